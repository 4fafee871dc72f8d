"""The command line. Flags become `Settings`; every expected failure is one line on stderr and a non-zero exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokengrove import initial_block

if TYPE_CHECKING:
    from tokengrove.commands.application import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command in the arguments. Secrets are cleared from the initial block before any other import."""
    initial_block.clear()
    from tokengrove.commands.application import main

    main()


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tokengrove.commands.application import app

    return app
