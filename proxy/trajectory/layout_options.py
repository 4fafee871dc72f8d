"""Options of an export and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from proxy.trajectory.advantages import Baseline
from proxy.trajectory.freshness import ANY_VERSION, Freshness
from proxy.trajectory.main_reward import RAW, MainReward
from proxy.trajectory.paths import Drift
from proxy.trajectory.scores import Unrewarded
from proxy.trajectory.selection import EVERYTHING, TrainSelection
from proxy.types import Credit, RewardScope


class Layout(StrEnum):
    """How a session becomes samples.

    `individual`: one per interaction. `concat`: one per leaf, aligned turns joined. `tree`: one per session, each node
    once, for attention over shared prefixes. `padded`: concat at fixed lengths, as in verl's batches.
    """

    INDIVIDUAL = "individual"
    CONCAT = "concat"
    TREE = "tree"
    PADDED = "padded"


class Include(StrEnum):
    """Additions to the entry of each turn: its messages, or the text of its output tokens."""

    MESSAGES = "messages"
    TEXT = "text"


class Images(StrEnum):
    """What an export has of images: where they stand and their bytes, each once; only where they stand; or nothing."""

    BYTES = "bytes"
    REFERENCES = "references"
    NONE = "none"


class TooLong(StrEnum):
    """What to do with a sample longer than the padded lengths: refuse the export, drop the sample, or truncate it."""

    REFUSE = "refuse"
    DROP = "drop"
    TRUNCATE = "truncate"


class Keep(StrEnum):
    """The part of a truncated response to keep: its first, last or middle tokens."""

    HEAD = "head"
    TAIL = "tail"
    MIDDLE = "middle"


@dataclass(frozen=True, slots=True)
class Padding:
    """Options of layout padded; lengths are in tokens. A truncated prompt keeps its end, a response the part `keep`."""

    prompt_length: int
    response_length: int
    pad_token_id: int = 0
    on_too_long: TooLong = TooLong.REFUSE
    keep: Keep = Keep.HEAD


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """How the samples of an export are made.

    `discount` and `credit` None: use the session's. `purposes` and `agents` None: select all turns. `padding` is set
    if and only if the layout is padded. `mask_unfinished`: train nothing of sessions that ended with `finished: false`.
    `outline`: runs of tokens take the place of arrays. `multi_modal_inputs`: the export has what the model's processor
    makes of images (None: if the model sees), and with `mrope` samples have the model's positions.
    `placeholders`: the tokens that stand for images; sampled ones are not trained.
    `reward_scope` None: that of the session's start; without any, the score that its end gave or its tree decides.
    """

    layout: Layout = Layout.CONCAT
    discount: float | None = None
    credit: Credit | None = None
    drift: Drift = Drift.FORK
    purposes: frozenset[str] | None = None
    agents: frozenset[str] | None = None
    train: TrainSelection = EVERYTHING
    reward: MainReward = RAW
    reward_scope: RewardScope | None = None
    unrewarded: Unrewarded = Unrewarded.ZERO
    mask_unfinished: bool = False
    padding: Padding | None = None
    advantages: Baseline | None = None
    step_advantages: Baseline | None = None
    include: frozenset[Include] = frozenset()
    freshness: Freshness = ANY_VERSION
    outline: bool = False
    images: Images = Images.REFERENCES
    multi_modal_inputs: bool | None = False
    mrope: bool = False
    placeholders: frozenset[int] = frozenset()

    @property
    def compares(self) -> bool:
        """Whether samples get advantages, which depend on other sessions."""
        return self.advantages is not None or self.step_advantages is not None

    @property
    def reads_purposes(self) -> bool:
        """Whether purposes decide which turns count, or which turn has the reward that the metrics name."""
        return self.purposes is not None or self.train.purposes is not None or self.reward.name is not None
