"""The options of an export for its layouts: the options of the request body, and values derived from them.

Staleness filters samples by the weight versions of their trained tokens. Context tokens of any version are allowed, and
a sample without trained tokens is never stale. With a `min_version`, uncertain versions of a turn count as -1, so the
turn never counts as fresh. Layout tree filters turns and paths one by one, so that an old turn does not exclude a whole
session. With `stale: mask`, tokens older than `min_version` are context, so only `max_version_span` filters samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from proxy.side_columns.columns import SideShape
from proxy.trajectory.main_reward import RAW, MainReward
from proxy.trajectory.token_arrays import BoolArray, IntArray, token_versions
from proxy.types import Interaction
from tokengrove.options.export import Forest, Padding, SampleOptions
from tokengrove.options.model import RouteKind
from tokengrove.options.start import Replay
from tokengrove.reasons import Segment


@dataclass(frozen=True, slots=True)
class Freshness:
    """Limits on weight versions of trained tokens; None means no limit.

    `min_version`: the oldest version allowed. `max_version_span`: the largest allowed newest minus oldest version.
    """

    min_version: int | None = None
    max_version_span: int | None = None

    @property
    def is_asked(self) -> bool:
        """Whether any limit is set."""
        return self.min_version is not None or self.max_version_span is not None

    def versions_of(self, interaction: Interaction) -> IntArray:
        """The weight version of each output token, int32 [output]. With a `min_version`, the tokens of a turn with
        uncertain versions count as older than any version."""
        versions = token_versions(interaction)
        return np.full_like(versions, -1) if self.min_version is not None and interaction.uncertain else versions

    def older(self, interaction: Interaction) -> BoolArray:
        """The output tokens that are older than `min_version`, bool [output]; none without a `min_version`."""
        versions = self.versions_of(interaction)
        return np.zeros(len(versions), bool) if self.min_version is None else versions < self.min_version

    def admits(self, versions: IntArray) -> bool:
        """Whether tokens of these weight versions may be trained in one sample."""
        return self.is_recent(versions) and self.is_narrow(versions)

    def is_recent(self, versions: IntArray) -> bool:
        """Whether no version is older than `min_version`."""
        return self.min_version is None or not len(versions) or int(versions.min()) >= self.min_version

    def is_narrow(self, versions: IntArray) -> bool:
        """Whether the versions span at most `max_version_span`."""
        most = self.max_version_span
        return most is None or not len(versions) or int(versions.max()) - int(versions.min()) <= most


ANY_VERSION = Freshness()


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(SampleOptions):
    """How the samples of an export are made.

    `discount`, `credit` and `reward_scope` None: use the session's. `unrewarded` None: zero. `purposes`, `agents` and
    `segments` None: select all turns. `routes`: the routes whose turns are samples; None: the trained ones. `padding`
    is set if and only if the layout is padded, `forest` if it is forest; `drops_long`: samples that do not fit a
    sequence of it are dropped. `outline`: runs of tokens replace the arrays. `mrope`: samples have the model's
    positions. `placeholders`: the ids of tokens that stand for images; sampled placeholders are not trained. `columns`:
    the side columns that samples have. `shows`: the kinds of them that are wanted, whether any is stored or not.
    `labels_route`: tables have a column for the route.
    """

    purposes: frozenset[str] | None = None
    agents: frozenset[str] | None = None
    segments: frozenset[Segment] | None = None
    routes: frozenset[str] | None = None
    reward: MainReward = RAW
    padding: Padding | None = None
    forest: Forest | None = None
    drops_long: bool = False
    freshness: Freshness = ANY_VERSION
    outline: bool = False
    mrope: bool = False
    placeholders: frozenset[int] = frozenset()
    columns: tuple[SideShape, ...] = ()
    shows: frozenset[Replay] = frozenset()
    labels_route: bool = False

    def takes(self, turn: Interaction) -> bool:
        """Whether samples are made of a turn, by its route. External turns have no tokens, so no sample has them."""
        if turn.route_kind is RouteKind.EXTERNAL:
            return False
        return turn.route_kind is RouteKind.POLICY if self.routes is None else turn.route in self.routes

    @property
    def compares(self) -> bool:
        """Whether samples get advantages, which depend on other sessions."""
        return any(each is not None for each in (self.advantages, self.step_advantages, self.turn_advantages))

    @property
    def reads_purposes(self) -> bool:
        """Whether purposes decide which turns are selected or trained, or which turn gets the reward of a metric."""
        return self.purposes is not None or self.train.purposes is not None or self.reward.name is not None
