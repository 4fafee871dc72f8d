"""What a server does while it starts, one line each on stderr. Nothing is shown until `show_steps` is called."""

from __future__ import annotations

import logging

_log = logging.getLogger("proxy.start")


def step(text: str) -> None:
    """Say what is done next."""
    _log.info(text)


def show_steps() -> None:
    """Show the steps of this process on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False


def hide_steps() -> None:
    """Show no more of them: another process of the same server does."""
    _log.setLevel(logging.WARNING)
