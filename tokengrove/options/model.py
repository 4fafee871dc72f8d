"""The options of a table `[models.NAME]`: what serves the requests whose `model` is NAME."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tokengrove.options.option import option


class RouteKind(StrEnum):
    """What serves a route.

    `policy`: an engine whose tokens are trained. `frozen`: an engine whose weights never change; its tokens are never
    trained. `external`: an API of another server; its answers have no token ids.
    """

    POLICY = "policy"
    FROZEN = "frozen"
    EXTERNAL = "external"


class UpstreamApi(StrEnum):
    """The API of an external model: chat completions or responses of OpenAI, or messages of Anthropic."""

    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A table of models: its route, beside the settings of an engine of its own."""

    kind: RouteKind = option(
        RouteKind.POLICY,
        "policy (an engine that is trained), frozen (an engine that is never updated) or external (another server).",
    )
    lora: bool = option(
        False, "Serve LoRA adapters only: requests get a 503 until the first adapter is published, never the base."
    )
    url: str | None = option(None, "URL of an external API, up to and including `/v1`.")
    api: UpstreamApi | None = option(None, "API of an external model.", otherwise="chat")
    upstream_model: str | None = option(None, "`model` of requests to an external API.", otherwise="the route's name")
    key: str | None = option(None, "Key of an external API. Prefer `key_variable`.", secret=True)
    key_variable: str | None = option(None, "Environment variable with the key of an external API.")
    timeout_s: float = option(600.0, "The longest wait for the next bytes of an external API.", unit="seconds", above=0)
    restricted: bool = option(False, "Only sessions that name the route in `models` at their start may use it.")
    max_turns: int | None = option(None, "The most turns of a session on this route.", least=1)
    max_total_tokens: int | None = option(None, "The most sampled tokens of a session on this route.", least=1)
