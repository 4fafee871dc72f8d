"""The environment variables by which SDKs find their server and key.

An agent never gets a control key: its variables hold the session's addresses and the agent's key.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

PLACEHOLDER = "set-by-tokengrove"
"""The value of OPENAI_API_KEY while agents run that name none. The session is in the address, so any key will do."""


class Addressed(Protocol):
    """What an agent gets of its session: the addresses and the agent's key."""

    @property
    def base_url(self) -> str: ...
    @property
    def root_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...


def agent_variables(session: Addressed) -> dict[str, str | None]:
    """The variables that lead the SDKs of an agent to its session; None: the variable has to be absent.

    LangChain and LiteLLM read OPENAI_API_BASE before OPENAI_BASE_URL. Anthropic's SDK sends a token beside the key.
    """
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_BASE": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.root_url,
        "ANTHROPIC_API_KEY": session.api_key,
        "ANTHROPIC_AUTH_TOKEN": None,
    }


@contextmanager
def variables_set(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process for the block; afterwards all variables are what they were before."""
    before = dict(os.environ)
    try:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Placeholder:
    """OPENAI_API_KEY for blocks that overlap: the first sets it if it is missing or empty, the last takes it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._set = False
        self._before: str | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._blocks += 1
            if not os.environ.get("OPENAI_API_KEY"):
                self._before = os.environ.get("OPENAI_API_KEY")
                os.environ["OPENAI_API_KEY"] = PLACEHOLDER
                self._set = True
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if self._set and not self._blocks:
                    self._take_back()

    def _take_back(self) -> None:
        self._set = False
        if os.environ.get("OPENAI_API_KEY") != PLACEHOLDER:
            return  # somebody has set another key meanwhile
        if self._before is None:
            del os.environ["OPENAI_API_KEY"]
        else:
            os.environ["OPENAI_API_KEY"] = self._before


placeholder_key = _Placeholder()
"""A block in which OPENAI_API_KEY is set: SDKs refuse to start without one."""
