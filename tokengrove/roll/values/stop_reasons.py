"""Why a decision or an episode ended."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any


class GenerateStopReason(Enum):
    """The outcome of one decision.

    FINISH: an answer was sampled. MAX_LENGTH: the prompt leaves no room for one, so the episode ends. ABORT: nothing
    was sampled, and the decision is repeated.
    """

    FINISH = auto()
    MAX_LENGTH = auto()
    ABORT = auto()

    @classmethod
    def of(cls, value: Any) -> GenerateStopReason:
        """The member of this name. `value`: a member, its name in any case, or a member of another enumeration.

        Raises ValueError for another value.
        """
        name = str(getattr(value, "name", value)).upper()
        if name not in cls.__members__:
            raise ValueError(f"a decision has the stop_reason {value!r}; it is one of {', '.join(cls.__members__)}")
        return cls[name]


class EpisodeStopReason(Enum):
    """Why an episode ended.

    Environments that own their messages receive MAX_LENGTH, ENV_TIMEOUT and EVAL_GT instead of an action, and then end
    the episode.
    """

    FINISH = auto()
    MAX_LENGTH = auto()
    MAX_STEPS = auto()
    ABORT = auto()
    ENV_RESET_FAILED = auto()
    ENV_TIMEOUT = auto()
    EVAL_GT = auto()
