"""Checks of parameters and render modes of games.

Parameters of runners and managers, which are in the same section, are accepted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokengrove.errors import InvalidRequest

_OF_OTHERS = frozenset(
    {
        *("mode", "tool_call_parser", "trajectory_mode", "reward_granularity", "enable_fork", "enable_thinking"),
        *("http_timeout", "episode_timeout", "max_tokens_per_step", "group_id", "num_env_groups"),
    }
)


def check_parameters(
    game: str, known: Iterable[str], given: Mapping[str, Any], render_mode: str, modes: Sequence[str]
) -> None:
    """Raise InvalidRequest for a parameter that neither the game nor a runner or manager has, and for a `render_mode`
    that is not in `modes`.
    """
    if render_mode not in modes:
        shown = " or ".join(modes)
        raise InvalidRequest(f"{game} is shown as {shown}; render_mode is {render_mode!r}", param="render_mode")
    for name in given:
        if name not in _OF_OTHERS:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}"
            raise InvalidRequest(f"{game} has no parameter {name!r}{hint}", param=name)
