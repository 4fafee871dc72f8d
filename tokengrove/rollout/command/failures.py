"""The failure of an episode whose command failed."""

from __future__ import annotations

from collections.abc import Collection

from tokengrove.rollout.episodes import EpisodeEnded
from tokengrove.rollout.sandboxes import CommandResult

SHOWN = 500
"""The maximum number of characters of an output in a reason."""


def failure_of(
    result: CommandResult, what: str, limit_s: float | None, exit_codes: Collection[int] | None = (0,)
) -> EpisodeEnded | None:
    """The failure of a command that exceeded its limit or exited with a code not in `exit_codes`; else None.

    `what`: the command's name in messages. `limit_s`: the limit in seconds, for messages. `exit_codes` None: any code.
    """
    if result.timed_out:
        return EpisodeEnded("Timeout", _said(f"{what} has not ended within {limit_s or 0:g} s", result.output))
    if exit_codes is None or result.exit_code in exit_codes:
        return None
    return EpisodeEnded("Failed", _said(f"{what} {how_it_ended(result)}", result.output))


def how_it_ended(result: CommandResult) -> str:
    """How a command ended, as the end of a sentence."""
    code = result.exit_code
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"


def _said(what: str, output: str) -> str:
    end = output[-SHOWN:].strip()
    return f"{what}: {end}" if end else what
