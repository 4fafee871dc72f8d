"""Tools that only a provider runs, such as a web search: this server has none of them.

A parser notes each among the dropped fields as a `HostedTool`, and the reply names it in `x-tokengrove-ignored`. With
`--hosted-tools refuse`, `check_hosted` refuses the request instead, also one that only counts tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokengrove.errors import UnsupportedParameter, brief


class HostedTool(str):
    """The note of a dropped tool that only its provider runs: its path, then its type."""

    __slots__ = ()

    @classmethod
    def at(cls, path: str, kind: str) -> HostedTool:
        """Return the note for the tool at `path`, such as "tools[1]"."""
        return cls(f"{path} of type {kind}")


def check_hosted(dropped: Sequence[str], treatment: str) -> None:
    """Raise UnsupportedParameter for the first hosted tool among dropped fields, if the `treatment` is "refuse"."""
    for note in dropped if treatment == "refuse" else ():
        if isinstance(note, HostedTool):
            path, _, kind = note.partition(" of type ")
            message = (
                f"'{path}' has type {brief(kind)}, a tool that only its provider runs, which this server is set to "
                "refuse (--hosted-tools); leave it out, or give a function that your client runs"
            )
            raise UnsupportedParameter(message, param=path)
