"""The scores of a session: the rewards of its samples, and the values that advantages compare.

A reward belongs to the session, so every sample of a session has the session's score, in which each reward counts once.
The first of these decides: the scope that the export sets, else the scope set at the session's start; the score given
for the whole session at its end; the tree. In the tree, if answers to one prompt are alternatives, each path has a
score of its own; otherwise the rewards of all turns add up.

Answers to one prompt are alternatives or steps of one episode. Which of the two depends on when they were sampled.
Alternatives are rewarded choices of one request (`n`), or rewarded answers of which two overlapped: the later began
before the earlier was complete, so neither can be a step after the other. Answers one after the other are steps, and
their rewards add up: an agent without memory sends the same prompt again when it observes the same again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from types import MappingProxyType
from typing import NamedTuple

from proxy.trajectory.paths import leaves, path_nodes
from proxy.trajectory.tree import Branch
from tokengrove.options.export import Drift, Unrewarded
from tokengrove.options.session import RewardScope
from tokengrove.reasons import Reason

Peer = tuple[str | None] | None
"""The scores of a group that a score is compared with: one agent's, with its name in the tuple; None: all scores."""


State = tuple[str, Peer]
"""The key of turns that are compared as steps: the hash of the messages before them, and their peers."""


NO_SOURCES: Mapping[str, Sequence[str]] = MappingProxyType({})


class Compared(NamedTuple):
    """A score that its group compares with the scores of `peer`."""

    score: float | None
    peer: Peer


@dataclass(frozen=True, slots=True)
class SessionScores:
    """The scores of a session. A score is None if none of the rewards that it sums was set.

    `score`: the score of the session; with scope PATH and several rewarded answers to one prompt, the mean of the
    rewarded paths. `paths`: the score of each path by the id of its last turn, in order of completion. `through`: for
    each turn, the ends of the paths that contain it. `answers`: the rewarded answers to one prompt, if the tree decides
    on the scope. `compared`: the ends of the paths with a turn that `train` selects.

    With scope AGENT, a turn has the score of its agent, and a path the score of its last turn. `agents`: the scores by
    agent (None: turns without an agent). `compared_agents`: the agents with a turn that `train` selects. `agent_of`:
    the agent of each turn by id. `by_agent`: scores are compared only with scores of the same agent.
    """

    scope: RewardScope
    score: float | None
    paths: Mapping[str, float | None]
    through: Mapping[str, Sequence[str]]
    compared: frozenset[str]
    unrewarded: Unrewarded
    by_agent: bool
    agents: Mapping[str | None, float | None]
    compared_agents: frozenset[str | None]
    agent_of: Mapping[str, str | None]
    answers: RewardedAnswers

    def of(self, ends: Iterable[str]) -> float | None:
        """The score of a sample on the paths with these `ends`: the session's, or the mean of its paths or agents."""
        match self.scope:
            case RewardScope.SESSION:
                return self.score
            case RewardScope.PATH:
                return _mean([self.paths[end] for end in self._last(ends)])
            case RewardScope.AGENT:
                return _mean([self.agents[agent] for agent in self._agents(ends)])

    def values(self, ends: Iterable[str]) -> list[Compared]:
        """The scores by which a sample on these paths is compared: its session's, or its paths' or agents'."""
        match self.scope:
            case RewardScope.SESSION:
                found = [Compared(self.score, None)] if self.compared else []
            case RewardScope.PATH:
                ended = [end for end in self._last(ends) if end in self.compared]
                found = [Compared(self.paths[end], self.peer_of(end)) for end in ended]
            case RewardScope.AGENT:
                agents = [agent for agent in self._agents(ends) if agent in self.compared_agents]
                found = [Compared(self.agents[agent], (agent,)) for agent in agents]
        if self.unrewarded is Unrewarded.ZERO:
            return [each._replace(score=each.score or 0.0) for each in found]
        return [each for each in found if each.score is not None]

    def is_left_out(self, ends: Iterable[str]) -> bool:
        """Whether a sample on these paths is left out because it is unrewarded."""
        return self.unrewarded is Unrewarded.SKIP and self.of(ends) is None

    @property
    def everything(self) -> Iterable[str]:
        """The `ends` of the whole session: all paths; with scope AGENT, all turns on them."""
        return self.through if self.scope is RewardScope.AGENT else self.paths

    @property
    def peers(self) -> list[Peer]:
        """The peers that this session's scores have in its group: its agents, or None for all scores."""
        return [(agent,) for agent in self._agents(self.through)] if self.by_agent else [None]

    def _last(self, ends: Iterable[str]) -> list[str]:
        """The ends of the paths that go on from paths with these ends over conversations, each once."""
        return list(
            dict.fromkeys(last for end in ends for last in ((end,) if end in self.paths else self.through[end]))
        )

    def _agents(self, ends: Iterable[str]) -> list[str | None]:
        """The agents of these turns, each once."""
        return list(dict.fromkeys(self.agent_of[end] for end in ends))

    def peer_of(self, end: str) -> Peer:
        """The peers of a path's score, or of a turn's return."""
        return (self.agent_of[end],) if self.by_agent else None


def score_session(
    nodes: dict[str, Branch],
    selected: Collection[str],
    chosen: Collection[str],
    main: Mapping[str, float | None],
    *,
    drift: Drift,
    scope: RewardScope | None,
    given: float | None,
    unrewarded: Unrewarded,
    sources: Mapping[str, Sequence[str]] = NO_SOURCES,
) -> SessionScores:
    """Score a session by the `main` rewards of its turns, by id. `nodes` are in order of `seq`.

    `selected`: the turns that the filter keeps. `chosen`: the turns that `train` selects. `scope`: the scope that the
    export or the session's start sets. `given`: the score of the whole session; None: the sum of the main rewards on
    the paths that end with a selected turn or, if none of them is set, of all turns. `sources`: the turns that
    conversations go on from, by the id of their first turn; paths then go on over conversations.
    """
    ends = leaves(list(nodes.values()), selected, drift)
    paths = {end.interaction.id: [node.interaction.id for node in path_nodes(end, drift)] for end in ends}
    through: dict[str, list[str]] = defaultdict(list)
    for end, names in paths.items():
        for name in names:
            through[name].append(end)
    sums = {end: total(main[name] for name in names) for end, names in paths.items()}
    if sources:
        paths = _over_lineage(nodes, paths, sources, drift)
        through = defaultdict(list)
        for end, names in paths.items():
            for name in names:
                through[name].append(end)
        sums = {end: total(main[name] for name in names) for end, names in paths.items()}
    whole = total(main[name] for name in through)
    score = total(main.values()) if whole is None else whole
    answers, tree_decides = rewarded_answers(nodes, main), scope is None and given is None
    scope = scope or (RewardScope.PATH if tree_decides and answers.are_alternatives else RewardScope.SESSION)
    if scope is RewardScope.PATH and answers != RewardedAnswers():
        score = _mean(list(sums.values()))
    elif scope is RewardScope.SESSION and given is not None:
        score = given
    agent_of = {name: node.interaction.agent for name, node in nodes.items()}
    rewards_of: dict[str | None, list[float | None]] = defaultdict(list)
    for name, agent in agent_of.items():
        if name in through:
            rewards_of[agent].append(main[name])
    return SessionScores(
        scope=scope,
        score=score,
        paths=sums,
        through=through,
        compared=frozenset(end for name in chosen for end in through.get(name, ())),
        unrewarded=unrewarded,
        by_agent=scope is RewardScope.AGENT,
        compared_agents=frozenset(agent_of[name] for name in chosen if name in through),
        agents={agent: total(rewards) for agent, rewards in rewards_of.items()},
        agent_of=agent_of,
        answers=answers if tree_decides else RewardedAnswers(),
    )


def _over_lineage(
    nodes: Mapping[str, Branch], paths: Mapping[str, list[str]], sources: Mapping[str, Sequence[str]], drift: Drift
) -> dict[str, list[str]]:
    """The paths that no other goes on from over conversations, each with the turns of those that it came from.

    Turns that the filter leaves out link conversations all the same.
    """
    found: dict[str, list[str]] = {}
    followed: set[str] = set()
    for end, own in paths.items():
        names = dict.fromkeys(own)
        waiting = [source for name in own for source in sources.get(name, ())]
        while waiting:
            above = [node.interaction.id for node in path_nodes(nodes[waiting.pop()], drift)]
            new = [name for name in above if name not in names]
            names |= dict.fromkeys(new)
            waiting += [source for name in new for source in sources.get(name, ())]
        found[end] = list(names)
        followed.update(list(names)[len(own) :])
    return {end: names for end, names in found.items() if end not in followed}


def total(rewards: Iterable[float | None]) -> float | None:
    """The sum of the rewards that were set; None if none was."""
    found = [reward for reward in rewards if reward is not None]
    return fsum(found) if found else None


def _mean(scores: Sequence[float | None]) -> float | None:
    found = [score for score in scores if score is not None]
    return fsum(found) / len(found) if found else None


# The possible reasons of a second answer to one prompt. An answer not aligned with its parent has only that reason.
ASKED_AGAIN = frozenset({Reason.RESAMPLED, Reason.TEMPLATE, Reason.DRIFT})


class Pair(NamedTuple):
    """The ids of two rewarded answers to one prompt, in the order in which they began."""

    earlier: str
    later: str


@dataclass(frozen=True, slots=True)
class RewardedAnswers:
    """The rewarded answers to one prompt in a session. Rewarded means that they or a turn below them have a reward.

    Each field is the first pair of its kind; None if there is none. `choices`: two choices of one request.
    `overlapping`: two answers that overlapped. `successive`: one answer after the other.
    """

    choices: Pair | None = None
    overlapping: Pair | None = None
    successive: Pair | None = None

    @property
    def are_alternatives(self) -> bool:
        """Whether some are alternatives, so that their sum would hide which was better."""
        return self.choices is not None or self.overlapping is not None


def rewarded_answers(nodes: Mapping[str, Branch], main: Mapping[str, float | None]) -> RewardedAnswers:
    """Find answers to one prompt that have `main` rewards. `nodes` are complete, in order of `seq`."""
    choices = overlapping = successive = None
    for answers in _answers(nodes, _rewarded(nodes, main)):
        first = {_request(node): node for node in reversed(answers)}
        choices = choices or _choices(answers, first)
        if not any(node.interaction.reason in ASKED_AGAIN for node in answers):
            continue  # the caller set the state hash: the prompts differ
        for earlier, later in _one_after_the_other(list(first.values())[::-1]):
            overlaps = later.interaction.created_at < (earlier.interaction.completed_at or 0.0)
            if overlaps:
                overlapping = overlapping or _pair(earlier, later)
            else:
                successive = successive or _pair(earlier, later)
    return RewardedAnswers(choices, overlapping, successive)


def _choices(answers: Sequence[Branch], first: Mapping[str, Branch]) -> Pair | None:
    """Two answers of one request; `first` has the first answer of each."""
    others = (node for node in answers if first[_request(node)] is not node)
    return next((_pair(first[_request(node)], node) for node in others), None)


def _rewarded(nodes: Mapping[str, Branch], main: Mapping[str, float | None]) -> set[str]:
    """The ids of all turns with a reward, of their own or on a turn below."""
    found: set[str] = set()
    for name, node in reversed(list(nodes.items())):  # children before parents
        if main[name] is not None or name in found:
            found.add(name)
            if node.parent is not None:
                found.add(node.parent.interaction.id)
    return found


def _answers(nodes: Mapping[str, Branch], rewarded: set[str]) -> Iterable[list[Branch]]:
    """The rewarded answers to each prompt that has several."""
    # The state hash is that of the messages after the parent's answer, so with the parent it names the prompt.
    asked: dict[tuple[str, str | None, str | None], list[Branch]] = defaultdict(list)
    for node in nodes.values():
        if node.interaction.id in rewarded:
            turn = node.interaction
            asked[turn.route, turn.parent_id, turn.state_hash].append(node)
    return [answers for answers in asked.values() if len(answers) > 1]


def _one_after_the_other(answers: Sequence[Branch]) -> Iterator[tuple[Branch, Branch]]:
    """Pairs of answers: each, in the order in which they began, with the earlier answer that was complete last."""
    begun = sorted(answers, key=lambda node: node.interaction.created_at)
    latest = begun[0]
    for node in begun[1:]:
        yield latest, node
        latest = max(latest, node, key=lambda each: each.interaction.completed_at or 0.0)


def _pair(earlier: Branch, later: Branch) -> Pair:
    return Pair(earlier.interaction.id, later.interaction.id)


def _request(node: Branch) -> str:
    """The id of an answer's request. Choices after the first append `.1`, `.2`, ... to the id of the first."""
    return node.interaction.id.partition(".")[0]
