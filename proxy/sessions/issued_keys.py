"""New keys in clear text, as start_session and rotate_keys return them. The server stores hashes only."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from enum import StrEnum

from proxy.types import SessionRecord

FEEDBACK_PREFIX = "fk-"
"""What every feedback key begins with."""


class KeyKind(StrEnum):
    """The keys of a session: the agent's, the environment's (control), and the secret in the path of `base_url`.

    A session has a feedback key only once it was asked for. It rewards turns that it names, and does nothing else.
    """

    AGENT = "agent"
    CONTROL = "control"
    PATH = "path"
    FEEDBACK = "feedback"


@dataclass(frozen=True, slots=True)
class IssuedKeys:
    """A session and its new keys in clear text. A key that was not replaced is None."""

    record: SessionRecord
    api_key: str | None
    control_key: str | None
    path_key: str | None
    feedback_key: str | None = None


def new_api_key() -> str:
    """A random key for the agent: 192 bits."""
    return f"sk-{secrets.token_urlsafe(24)}"


def new_control_key() -> str:
    """A random key for the environment: 192 bits."""
    return f"ck-{secrets.token_urlsafe(24)}"


def new_feedback_key() -> str:
    """A random key for what collects the feedback of users: 192 bits."""
    return f"{FEEDBACK_PREFIX}{secrets.token_urlsafe(24)}"


def new_path_key() -> str:
    """A random secret for the path of `base_url`: 128 bits."""
    return secrets.token_urlsafe(16)


def expiry(lifetime_s: float | None, default_s: float | None) -> float | None:
    """The expiry of keys that are issued now, in Unix seconds; None: never. `default_s`: the default lifetime."""
    lifetime_s = default_s if lifetime_s is None else lifetime_s
    return None if lifetime_s is None else time.time() + lifetime_s
