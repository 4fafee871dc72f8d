"""How to export: every choice of a request, with its default."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from proxy.trajectory.advantages import Baseline
from proxy.trajectory.freshness import ANY_VERSION, Freshness
from proxy.trajectory.main_reward import RAW, MainReward
from proxy.trajectory.paths import Drift
from proxy.trajectory.selection import EVERYTHING, TrainSelection
from proxy.types import Credit


class Layout(StrEnum):
    INDIVIDUAL = "individual"
    CONCAT = "concat"
    TREE = "tree"
    PADDED = "padded"


class Include(StrEnum):
    """What is added to the entry of each turn: its messages, or the text of its tokens."""

    MESSAGES = "messages"
    TEXT = "text"


class TooLong(StrEnum):
    """What becomes of a sample that does not fit: the export is refused, the sample dropped, or cut."""

    REFUSE = "refuse"
    DROP = "drop"
    TRUNCATE = "truncate"


class Keep(StrEnum):
    """Which tokens of a response that is cut are kept: the first ones, the last ones, or those in the middle."""

    HEAD = "head"
    TAIL = "tail"
    MIDDLE = "middle"


@dataclass(frozen=True, slots=True)
class Padding:
    """Lengths in tokens of layout padded. A prompt that is cut keeps its end, a response what `keep` says."""

    prompt_length: int
    response_length: int
    pad_token_id: int = 0
    on_too_long: TooLong = TooLong.REFUSE
    keep: Keep = Keep.HEAD


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """`discount` and `credit` None: the session's own. `purposes` and `agents` None: all of them.

    `padding` is set with layout padded, and only then. `mask_unfinished`: sessions that ended with `finished: false`
    are context from end to end.
    """

    layout: Layout = Layout.INDIVIDUAL
    discount: float | None = None
    credit: Credit | None = None
    drift: Drift = Drift.FORK
    purposes: frozenset[str] | None = None
    agents: frozenset[str] | None = None
    train: TrainSelection = EVERYTHING
    reward: MainReward = RAW
    mask_unfinished: bool = False
    padding: Padding | None = None
    advantages: Baseline | None = None
    step_advantages: Baseline | None = None
    include: frozenset[Include] = frozenset()
    freshness: Freshness = ANY_VERSION
