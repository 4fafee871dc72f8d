"""What a command that did not end well has done to its episode."""

from __future__ import annotations

from collections.abc import Collection

from tokengrove.rollout.episodes import EpisodeEnded
from tokengrove.rollout.sandboxes import CommandResult

SHOWN = 500
"""How many characters of an output stand in the reason."""


def failure_of(
    result: CommandResult, what: str, limit_s: float | None, exit_codes: Collection[int] | None = (0,)
) -> EpisodeEnded | None:
    """The end of an episode whose command ran into its limit, or ended with none of `exit_codes` (None: any)."""
    if result.timed_out:
        return EpisodeEnded("Timeout", _said(f"{what} has not ended within {limit_s or 0:g} s", result.output))
    if exit_codes is None or result.exit_code in exit_codes:
        return None
    return EpisodeEnded("Failed", _said(f"{what} {how_it_ended(result)}", result.output))


def how_it_ended(result: CommandResult) -> str:
    """How a command ended, in words."""
    code = result.exit_code
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"


def _said(what: str, output: str) -> str:
    end = output[-SHOWN:].strip()
    return f"{what}: {end}" if end else what
