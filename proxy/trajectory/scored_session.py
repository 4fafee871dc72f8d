"""A session as an export scores it: its tree, the rewards that count, returns, scores, and whether it is left out.

Group statistics and layouts both use it, so that a sample is compared by the same number that the statistics contain.
No tokens are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.lineage import segments_of, sources_of
from proxy.trajectory.purpose import derive_purposes
from proxy.trajectory.returns import compute_returns
from proxy.trajectory.scores import Compared, SessionScores, State, score_session
from proxy.trajectory.selection import chosen_turns
from proxy.trajectory.tree import Branch, build_tree
from proxy.types import Interaction, SessionRecord
from tokengrove.options.export import Unrewarded
from tokengrove.options.session import Credit, Outcome, RewardScope, SessionStatus
from tokengrove.reasons import LeftOut


@dataclass(frozen=True, slots=True)
class ScoredSession:
    """The turns of one route of a session under the options of an export. Mappings are by interaction id, in order of
    completion.

    `route`: "" without a table of models. `main`: the rewards that count. `selected`: turns that the filter keeps.
    `chosen`: turns that `train` selects.
    """

    record: SessionRecord
    route: str
    nodes: dict[str, Branch]
    purposes: Mapping[str, str]
    main: Mapping[str, float | None]
    returns: Mapping[str, float]
    selected: frozenset[str]
    chosen: frozenset[str]
    scores: SessionScores
    left_out: LeftOut | None
    discount: float
    credit: Credit

    def rewards(self) -> Iterator[Compared]:
        """The rewards of turns, each with the peers that it is compared with; none if the session is left out."""
        for name, reward in self.main.items():
            if reward is not None and self.left_out is None:
                yield Compared(reward, self.scores.peer_of(name))

    def returns_of(self, rewards: Mapping[str, float]) -> dict[str, float]:
        """The returns of the turns if they had these rewards, by id; a missing one counts as 0."""
        turns = [node.interaction for node in self.nodes.values()]
        return compute_returns(turns, self.discount, self.credit, rewards)

    def values(self) -> list[Compared]:
        """The scores that the session adds to its group: its own, or its paths' or agents'; none if it is left out."""
        return [] if self.left_out else self.scores.values(self.scores.everything)

    def steps(self) -> Iterator[tuple[State, float]]:
        """The state and return of each turn that is compared with other turns of its state."""
        for name in self.nodes:
            state = self.state(name)
            if state is not None and self.is_compared(name):
                yield state, self.returns[name]

    def state(self, name: str) -> State | None:
        """The state of a turn; None if it has no state, so that it is not compared."""
        state_hash = self.nodes[name].interaction.state_hash
        return None if state_hash is None else (state_hash, self.scores.peer_of(name))

    def is_compared(self, name: str) -> bool:
        """Whether a turn is selected and trained, and is in a sample that is not left out."""
        return (
            self.left_out is None
            and name in self.selected
            and name in self.chosen
            and not self.scores.is_left_out(self.ends_through([name]))
        )

    def ends_through(self, names: Iterable[str]) -> tuple[str, ...]:
        """The ends of all paths that contain one of these turns; with scope AGENT, the turns that are on a path."""
        if self.scores.scope is RewardScope.AGENT:
            return tuple(name for name in names if name in self.scores.through)
        return tuple(dict.fromkeys(end for name in names for end in self.scores.through.get(name, ())))


def scored_session(record: SessionRecord, interactions: Sequence[Interaction], options: LayoutOptions) -> ScoredSession:
    """Score a session. `interactions`: all turns of one of its routes, in order of `seq`; their tokens are not read.

    With turns of several routes (`trained_turns`), the score sums their rewards.
    """
    nodes, purposes = build_tree(interactions), derive_purposes(interactions)
    complete = [node.interaction for node in nodes.values()]
    main = options.reward.of(complete, record.metrics, purposes)
    selected = frozenset(name for name, node in nodes.items() if _is_selected(node, purposes[name], options))
    if options.segments is not None:
        kinds = segments_of(complete)
        selected = frozenset(name for name in selected if kinds[name] in options.segments)
    credit = options.credit or record.credit
    chosen = chosen_turns(nodes, purposes, options.train)
    scores = score_session(
        nodes,
        selected,
        chosen & selected,
        main,
        drift=options.drift,
        scope=options.reward_scope or record.reward_scope,
        sources=sources_of(complete) if credit is Credit.LINEAGE else {},
        given=None if options.reward.replaces(complete, record.metrics) else record.score,
        unrewarded=options.unrewarded or Unrewarded.ZERO,
    )
    discount = record.discount if options.discount is None else options.discount
    return ScoredSession(
        record=record,
        route=interactions[0].route if interactions else "",
        nodes=nodes,
        purposes=purposes,
        main=main,
        returns=compute_returns(interactions, discount, credit, main),
        selected=selected,
        chosen=chosen,
        scores=scores,
        left_out=_left_out(record, scores) if options.unrewarded is Unrewarded.SKIP else None,
        discount=discount,
        credit=credit,
    )


def _is_selected(node: Branch, purpose: str, options: LayoutOptions) -> bool:
    if not options.takes(node.interaction):
        return False
    if options.agents is not None and node.interaction.agent not in options.agents:
        return False
    return options.purposes is None or purpose in options.purposes


def _left_out(record: SessionRecord, scores: SessionScores) -> LeftOut | None:
    if record.status is SessionStatus.ACTIVE:
        return LeftOut.ACTIVE
    if record.outcome is Outcome.FAILED:
        return LeftOut.FAILED
    return LeftOut.UNREWARDED if scores.of(scores.everything) is None else None
