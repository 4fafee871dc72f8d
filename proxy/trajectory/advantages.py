"""Group-relative advantages. A group holds all sessions that match the export, not only the sessions of one page.

Sessions with the same `group_id` form a group; a session without a `group_id` is a group of its own. A group compares
the scores of its sessions (`trajectory.scores`): one value per session, or one per path or agent if the reward scope is
path or agent. An agent's score is compared only with scores of the same agent. A value that is alone has advantage 0.
Step advantages compare the returns of steps in one group that have the same `state_hash` and, with scope agent, the
same agent. A step without a `state_hash` has advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.sample_row import Labels, Weighting
from proxy.trajectory.scored_session import ScoredSession
from proxy.trajectory.scores import Compared, Peer, State
from proxy.trajectory.token_arrays import Placement
from proxy.types import Interaction
from tokengrove.options.export import Baseline, TurnCredit
from tokengrove.options.session import RewardScope

# Added to the standard deviation to avoid a division by zero; verl's GRPO uses the same value.
_EPSILON = 1e-6


@dataclass(slots=True)
class RunningStatistics:
    """Running count, mean and sum of squared deviations (`squares`), by Welford's one-pass algorithm (1962)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        distance = value - self.mean
        self.mean += distance / self.count
        self.squares += distance * (value - self.mean)

    def advantage(self, value: float, baseline: Baseline) -> float:
        """The advantage of `value`, which must be one of the added values; 0 if it is the only one."""
        if self.count < 2:
            return 0.0
        if baseline is Baseline.LEAVE_ONE_OUT:
            return value - (self.mean * self.count - value) / (self.count - 1)
        return (value - self.mean) / (math.sqrt(self.squares / (self.count - 1)) + _EPSILON)


Group = str | tuple[str] | tuple[str | tuple[str], str]
"""A group_id; for a session without one, its session_id in a tuple. With a route, it is paired with its name."""


def group_of(session_id: str, group_id: str | None, route: str = "") -> Group:
    """The group that the turns of a route belong to: only turns of one route are compared."""
    group = (session_id,) if group_id is None else group_id
    return (group, route) if route else group


@dataclass(frozen=True, slots=True)
class Groups:
    """Statistics of all groups: `scores` and `rewards` of turns by group and peers, and returns of steps (`states`) by
    group and state.

    `scopes`: for each group, the reward scopes of its compared sessions, each with the id of its first session.
    """

    scores: dict[tuple[Group, Peer], RunningStatistics] = field(default_factory=dict)
    states: dict[tuple[Group, State], RunningStatistics] = field(default_factory=dict)
    rewards: dict[tuple[Group, Peer], RunningStatistics] = field(default_factory=dict)
    scopes: dict[Group, dict[RewardScope, str]] = field(default_factory=dict)

    def add(
        self,
        group: Group,
        scores: Iterable[Compared],
        steps: Iterable[tuple[State, float]],
        rewards: Iterable[Compared] = (),
    ) -> None:
        """Add one session: its scores, the state and return of each of its steps, and the rewards of its turns."""
        for score, peer in scores:
            self.scores.setdefault((group, peer), RunningStatistics()).add(score or 0.0)
        for state, value in steps:
            self.states.setdefault((group, state), RunningStatistics()).add(value)
        for reward, peer in rewards:
            self.rewards.setdefault((group, peer), RunningStatistics()).add(reward or 0.0)

    def note_scope(self, group: Group, scope: RewardScope, session_id: str) -> None:
        """Record the reward scope of a session that the group compares."""
        self.scopes.setdefault(group, {}).setdefault(scope, session_id)

    def mixed_scopes(self, group: Group) -> str | None:
        """The reward scopes of a group's sessions, each with the id of one session; None if there is only one scope."""
        found = self.scopes.get(group, {})
        return ", ".join(f"{scope} ({name!r})" for scope, name in found.items()) if len(found) > 1 else None

    def members(self, group: Group, peers: Iterable[Peer] = (None,)) -> int:
        """The number of scores that a group compares: the smallest number among these `peers`."""
        spreads = [self.scores.get((group, peer)) for peer in peers]
        return min((0 if spread is None else spread.count for spread in spreads), default=0)

    def advantage(self, group: Group, scores: Sequence[Compared], baseline: Baseline) -> float:
        """The mean advantage of a sample's scores; 0 without a score."""
        spreads = [(self.scores.get((group, peer)), score or 0.0) for score, peer in scores]
        found = [spread.advantage(score, baseline) for spread, score in spreads if spread is not None]
        return math.fsum(found) / len(found) if found else 0.0

    def step_advantage(self, group: Group, state: State | None, value: float, baseline: Baseline) -> float:
        """The advantage of a step whose return is `value`; 0 without a state."""
        spread = None if state is None else self.states.get((group, state))
        return 0.0 if spread is None else spread.advantage(value, baseline)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A session and the statistics of all `groups`. `options` select the advantages to compute."""

    scored: ScoredSession
    groups: Groups
    options: LayoutOptions
    _process: dict[str, float] = field(default_factory=dict, init=False)

    def weighting(self, places: Sequence[Placement], ends: Sequence[str]) -> Weighting:
        """The score and advantages of a sample on the paths with these `ends`. Its weight is set later, when all
        samples of the session are known.
        """
        options, scores, advantage, steps = self.options, self.scored.scores, None, None
        if options.advantages is not None:
            advantage = self.groups.advantage(self._group, scores.values(ends), options.advantages)
        if options.step_advantages is not None:
            steps = tuple(self._step_advantage(place.interaction, options.step_advantages) for place in places)
        turns = None if options.turn_advantages is None else self._turn_advantages(places, ends)
        return Weighting(scope=scores.scope, score=scores.of(ends), advantage=advantage, steps=steps, turns=turns)

    def _turn_advantages(self, places: Sequence[Placement], ends: Sequence[str]) -> tuple[float, ...]:
        """The advantage of each turn of a sample (`TurnCredit`)."""
        baseline = self.options.advantages or Baseline.GRPO
        if self.options.turn_advantages is TurnCredit.PROCESS:
            returns = self._process_returns(baseline)
            return tuple(returns.get(place.interaction.id, 0.0) for place in places)
        episode = self.groups.advantage(self._group, self.scored.scores.values(ends), baseline)
        steps = [self._step_advantage(place.interaction, baseline) for place in places]
        return tuple(episode + self.options.step_weight * step for step in steps)

    def _process_returns(self, baseline: Baseline) -> dict[str, float]:
        """The returns of the session's turns, where each reward is replaced by its advantage in the group."""
        if self._process:
            return self._process
        compared: dict[str, float] = {}
        for name, reward in self.scored.main.items():
            spread = self.groups.rewards.get((self._group, self.scored.scores.peer_of(name)))
            if reward is not None and spread is not None:
                compared[name] = spread.advantage(reward, baseline)
        self._process.update(self.scored.returns_of(compared))
        return self._process

    def entry(self) -> Labels:
        """The labels of the session's score in its entry in the export."""
        scores, record = self.scored.scores, self.scored.record
        found: Labels = {"reward_scope": scores.scope, "score": scores.score, "left_out": self.scored.left_out}
        if record.score is not None:
            found["episode_score"] = record.score
        if scores.scope is RewardScope.AGENT:
            found["agent_scores"] = {agent or "": score for agent, score in scores.agents.items()}
        if self.options.compares:
            found["group_members"] = self.groups.members(self._group, scores.peers)
        return found

    def warnings(self) -> Iterator[str]:
        """Warnings about rewards that can be read in two ways, and about groups with too few or unlike scores."""
        answers = self.scored.scores.answers
        if answers.overlapping is not None:
            yield (
                f"the answers {' and '.join(answers.overlapping)} to one prompt overlapped and were both rewarded, so "
                "they count as alternatives, each path by itself; 'reward_scope': session adds their rewards up"
            )
        elif answers.successive is not None:
            told = "the answers " + " and ".join(answers.successive) + " to one prompt came one after the other"
            if answers.are_alternatives:
                yield (
                    f"{told}, and others are choices of one request, so each path counts by itself; "
                    "'reward_scope': session adds the rewards up"
                )
            else:
                yield (
                    f"{told} and were both rewarded, so they count as steps and their rewards add up; "
                    "'reward_scope': path compares them"
                )
        if self.options.compares and self.scored.left_out is None:
            if self.groups.members(self._group, self.scored.scores.peers) == 1:
                yield "its group has no other score to compare with, so its advantage is 0; export the whole 'group_id'"
            if self.options.advantages is not None and (mixed := self.groups.mixed_scopes(self._group)):
                yield f"its group compares scores of different scopes: {mixed}; 'reward_scope' gives all the same"

    @property
    def _group(self) -> Group:
        return group_of(self.scored.record.session_id, self.scored.record.group_id, self.scored.route)

    def _step_advantage(self, interaction: Interaction, baseline: Baseline) -> float:
        """The advantage of a turn among the turns of its state; 0 for a turn that is not compared."""
        if not self.scored.is_compared(interaction.id):
            return 0.0
        value = self.scored.returns[interaction.id]
        return self.groups.step_advantage(self._group, self.scored.state(interaction.id), value, baseline)
