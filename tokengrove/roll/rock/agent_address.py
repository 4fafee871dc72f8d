"""The address of an agent's model in the forms that SDKs need."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit


class AgentAddress(NamedTuple):
    """`url`: with or without `/v1` at its end."""

    url: str
    api_key: str

    @property
    def root_url(self) -> str:
        """Without `/v1`, for Anthropic's SDK."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def base_url(self) -> str:
        """With `/v1`, for OpenAI's SDKs."""
        return f"{self.root_url}/v1"


def seen_from_outside(url: str, public_url: str) -> str:
    """The session address `url` below the server's public address, which may have a path, but not a session's."""
    path = urlsplit(url).path.rstrip("/")
    public = public_url.rstrip("/").removesuffix("/v1")
    return public if not path or public.endswith(path) else public + path
