"""The environment variables from which SDKs read the address of their server and the key.

An agent never gets a control key: its variables contain the session's addresses and the agent's key.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

PLACEHOLDER = "set-by-tokengrove"
"""The value of OPENAI_API_KEY while agents run without a key. The address identifies the session, so any key works."""


class Addressed(Protocol):
    """The part of a session that an agent gets: the addresses and the agent's key."""

    @property
    def base_url(self) -> str: ...
    @property
    def root_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...


def agent_variables(session: Addressed) -> dict[str, str | None]:
    """The variables that point the SDKs of an agent to its session; None: the variable must be unset.

    LangChain and LiteLLM read OPENAI_API_BASE before OPENAI_BASE_URL. Anthropic's SDK would send ANTHROPIC_AUTH_TOKEN
    in addition to the key, and Google's would send GOOGLE_API_KEY instead of GEMINI_API_KEY.
    """
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_BASE": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.root_url,
        "ANTHROPIC_API_KEY": session.api_key,
        "ANTHROPIC_AUTH_TOKEN": None,
        "GOOGLE_GEMINI_BASE_URL": session.root_url,
        "GEMINI_API_KEY": session.api_key,
        "GOOGLE_API_KEY": None,
    }


@contextmanager
def variables_set(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process for the block, then restore all variables of the process."""
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
    """Sets OPENAI_API_KEY for overlapping blocks: the first sets it if it is missing or empty, the last restores it."""

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
            return  # another key was set meanwhile
        if self._before is None:
            del os.environ["OPENAI_API_KEY"]
        else:
            os.environ["OPENAI_API_KEY"] = self._before


placeholder_key = _Placeholder()
"""Set OPENAI_API_KEY for the block: SDKs refuse to start without a key."""
