"""The options of an export as the layouts need them: those of its body, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.trajectory.freshness import ANY_VERSION, Freshness
from proxy.trajectory.main_reward import RAW, MainReward
from tokengrove.options.export import Padding, SampleOptions


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(SampleOptions):
    """How the samples of an export are made.

    `discount`, `credit` and `reward_scope` None: use the session's. `unrewarded` None: zero. `purposes` and `agents`
    None: select all turns. `padding` is set if and only if the layout is padded. `outline`: runs of tokens take the
    place of arrays. With `mrope` samples have the model's positions. `placeholders`: the tokens that stand for images;
    sampled ones are not trained.
    """

    purposes: frozenset[str] | None = None
    agents: frozenset[str] | None = None
    reward: MainReward = RAW
    padding: Padding | None = None
    freshness: Freshness = ANY_VERSION
    outline: bool = False
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
