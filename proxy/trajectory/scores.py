"""The scores of a session: what its samples are rewarded with, and what advantages compare.

A reward belongs to the session, so every sample of a session has the session's score, in which each reward counts once.
What decides, in this order: the scope that the export asks for, else that of the session's start; the score that was
given for the whole session at its end; the tree: where answers to one prompt are alternatives, each path has a score of
its own, otherwise the rewards of all turns add up.

Answers to one prompt are alternatives, or steps of one episode: by when they were sampled, not by what was asked.
Alternatives are rewarded choices of one request (`n`), or rewarded answers of which two overlapped: the later was begun
before the earlier was complete, so neither can be a step after the other. An agent without memory asks the same again
when it observes the same again: answers one after the other are steps, and their rewards add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

from proxy.trajectory.paths import leaves, path_nodes
from proxy.trajectory.tree import Branch
from tokengrove.options.export import Drift, Unrewarded
from tokengrove.options.session import RewardScope
from tokengrove.reasons import Reason

Peer = tuple[str | None] | None
"""Whose scores of a group a score is compared with: those of one agent, whose name is in the tuple; None: of all."""


State = tuple[str, Peer]
"""What turns have in common that are compared as steps: the hash of the messages before them, and the peers."""


class Compared(NamedTuple):
    """A score that its group compares with those of `peer`."""

    score: float | None
    peer: Peer


@dataclass(frozen=True, slots=True)
class SessionScores:
    """The scores of one session. None as a score: nothing that it sums was rewarded.

    `score`: of the session; where answers are alternatives, the mean of the rewarded paths. `paths`: the score of each
    path by the id of its last turn, in order of completion. `through`: by turn id, the ends of the paths that it
    stands on. `answers`: the rewarded answers to one prompt, if the tree decides on the scope. `compared`: the ends of
    the paths with a turn that `train` selects. With scope AGENT, a turn is
    scored as its agent is, and a path as its last turn: `agents` are the scores by name (None: turns without a name),
    `compared_agents` those with a turn that `train` selects, and `agent_of` the agents of all turns by id. `by_agent`:
    scores are compared with those of the same agent only.
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
        """The score of a sample that stands on the paths with these `ends`: the session's, or the mean of its paths."""
        match self.scope:
            case RewardScope.SESSION:
                return self.score
            case RewardScope.PATH:
                return _mean([self.paths[end] for end in ends])
            case RewardScope.AGENT:
                return _mean([self.agents[agent] for agent in self._agents(ends)])

    def values(self, ends: Iterable[str]) -> list[Compared]:
        """The scores by which a sample on these paths is compared: its session's, or those of its paths or agents."""
        match self.scope:
            case RewardScope.SESSION:
                found = [Compared(self.score, None)] if self.compared else []
            case RewardScope.PATH:
                found = [Compared(self.paths[end], self.peer_of(end)) for end in ends if end in self.compared]
            case RewardScope.AGENT:
                agents = [agent for agent in self._agents(ends) if agent in self.compared_agents]
                found = [Compared(self.agents[agent], (agent,)) for agent in agents]
        if self.unrewarded is Unrewarded.ZERO:
            return [each._replace(score=each.score or 0.0) for each in found]
        return [each for each in found if each.score is not None]

    def is_left_out(self, ends: Iterable[str]) -> bool:
        """Whether a sample on these paths is left out because nothing rewards it."""
        return self.unrewarded is Unrewarded.SKIP and self.of(ends) is None

    @property
    def everything(self) -> Iterable[str]:
        """What stands for the whole session as `ends`: all paths; with scope AGENT all turns on them."""
        return self.through if self.scope is RewardScope.AGENT else self.paths

    @property
    def peers(self) -> list[Peer]:
        """Whose scores those of this session are compared with in its group: None for all, else an agent's."""
        return [(agent,) for agent in self._agents(self.through)] if self.by_agent else [None]

    def _agents(self, ends: Iterable[str]) -> list[str | None]:
        """The agents of these turns, each once."""
        return list(dict.fromkeys(self.agent_of[end] for end in ends))

    def peer_of(self, end: str) -> Peer:
        """Whose scores that of a path, or whose returns that of a turn, is compared with."""
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
) -> SessionScores:
    """Score a session by the `main` rewards of its turns, by id. `nodes` are in order of `seq`.

    `selected` are the turns that the filter keeps, `chosen` those that `train` selects. `scope`: what the export or the
    session's start asks for. `given`: the score of the whole session, None: the sum of the main rewards on the paths
    that end with a selected turn, or of all its turns if none of those is rewarded.
    """
    ends = leaves(list(nodes.values()), selected, drift)
    paths = {end.interaction.id: [node.interaction.id for node in path_nodes(end, drift)] for end in ends}
    through: dict[str, list[str]] = defaultdict(list)
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


def total(rewards: Iterable[float | None]) -> float | None:
    """The sum of the rewards that were set; None if none was."""
    found = [reward for reward in rewards if reward is not None]
    return fsum(found) if found else None


def _mean(scores: Sequence[float | None]) -> float | None:
    found = [score for score in scores if score is not None]
    return fsum(found) / len(found) if found else None


# The reasons that a second answer to one prompt can have. Without an aligned parent, its reason says only that.
ASKED_AGAIN = frozenset({Reason.RESAMPLED, Reason.TEMPLATE, Reason.DRIFT})


class Pair(NamedTuple):
    """The ids of two rewarded answers to one prompt, in the order in which they began."""

    earlier: str
    later: str


@dataclass(frozen=True, slots=True)
class RewardedAnswers:
    """What the rewarded answers to one prompt are in a session; rewarded: on themselves or on a turn below.

    `choices`: two choices of one request. `overlapping`: two that overlapped. `successive`: one after the other. Each
    is the first such pair, None if there is none.
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
            continue  # the caller's own state hash: their prompts differ
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
    """The ids of all turns with a reward, on themselves or on a turn below."""
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
    asked: dict[tuple[str | None, str | None], list[Branch]] = defaultdict(list)
    for node in nodes.values():
        if node.interaction.id in rewarded:
            asked[node.interaction.parent_id, node.interaction.state_hash].append(node)
    return [answers for answers in asked.values() if len(answers) > 1]


def _one_after_the_other(answers: Sequence[Branch]) -> Iterator[tuple[Branch, Branch]]:
    """Each answer in the order in which they began, with the one of those before it that was complete last."""
    begun = sorted(answers, key=lambda node: node.interaction.created_at)
    latest = begun[0]
    for node in begun[1:]:
        yield latest, node
        latest = max(latest, node, key=lambda each: each.interaction.completed_at or 0.0)


def _pair(earlier: Branch, later: Branch) -> Pair:
    return Pair(earlier.interaction.id, later.interaction.id)


def _request(node: Branch) -> str:
    """The request of an answer: its choices after the first have `.1`, `.2`, ... behind the id of the first."""
    return node.interaction.id.partition(".")[0]
