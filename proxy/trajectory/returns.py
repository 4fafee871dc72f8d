"""Discounted returns of interactions. They are computed from rewards and never replace them.

Credit `tree`: `return(i) = reward(i) + discount * mean(return(c) for complete children c of i)`, from the leaves to the
roots. Credit `linear`: `return(i) = reward(i) + discount * return(i + 1)` in order of completion, as AReaL's individual
export computes it. Credit `lineage`: as `tree`, but the children of a turn are also the first turns of conversations
that go on from it, the turn after the last one of a sub-agent is the one that continues the call, and a summary that
nothing goes on from is not counted (`trajectory.lineage`). Turns of another route earn nothing from it. A missing
reward counts as 0. An example from AReaL's documentation: A -> B -> C with reward 1 at C and discount 0.9 has returns
0.81, 0.9 and 1.0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from proxy.types import Lineage
from tokengrove.options.session import Credit, Purpose
from tokengrove.reasons import Segment, Status


class Rewarded(Protocol):
    """The fields of an interaction that returns are computed from."""

    @property
    def id(self) -> str: ...
    @property
    def parent_id(self) -> str | None: ...
    @property
    def status(self) -> Status: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def route(self) -> str: ...
    @property
    def purpose(self) -> str | None: ...
    @property
    def lineage(self) -> Lineage | None: ...


def compute_returns(
    interactions: Sequence[Rewarded],
    discount: float,
    credit: Credit,
    main: Mapping[str, float | None] | None = None,
) -> dict[str, float]:
    """The return of every complete interaction by id. `interactions` are of one session, in order of `seq`.

    `main` are the main rewards by id; None: use the raw rewards.
    """
    complete = [interaction for interaction in interactions if interaction.status is Status.COMPLETE]
    rewards = {i.id: (i.reward if main is None else main.get(i.id)) or 0.0 for i in complete}
    match credit:
        case Credit.LINEAR:
            return _linear(complete, rewards, discount)
        case Credit.LINEAGE:
            return _lineage(complete, rewards, discount)
        case Credit.TREE:
            return _tree(complete, rewards, discount)


def _tree(complete: Sequence[Rewarded], rewards: Mapping[str, float], discount: float) -> dict[str, float]:
    returns: dict[str, float] = {}
    children: dict[str, list[float]] = defaultdict(list)
    # A child ends after the commit of its parent, so the reverse order of completion visits children before parents.
    for interaction in reversed(complete):
        below = children.get(interaction.id)
        future = sum(below) / len(below) if below else 0.0
        returns[interaction.id] = rewards[interaction.id] + discount * future
        if interaction.parent_id is not None:
            children[interaction.parent_id].append(returns[interaction.id])
    return returns


def _lineage(complete: Sequence[Rewarded], rewards: Mapping[str, float], discount: float) -> dict[str, float]:
    after = _following(complete)
    returns: dict[str, float] = {}
    begun: set[str] = set()
    waiting = [turn.id for turn in complete]
    while waiting:  # deepest first, without recursion: a conversation may have thousands of turns
        name = waiting[-1]
        below = [each for each in after.get(name, ()) if each not in returns and each not in begun]
        if name not in returns and below and name not in begun:
            begun.add(name)
            waiting += below
            continue
        waiting.pop()
        if name not in returns:
            known = [returns[each] for each in after.get(name, ()) if each in returns]
            returns[name] = rewards[name] + discount * (sum(known) / len(known) if known else 0.0)
    return {turn.id: returns[turn.id] for turn in complete}


def _following(complete: Sequence[Rewarded]) -> dict[str, list[str]]:
    """The turns after each turn: children, conversations that go on from it, or what a sub-agent's answer was for."""
    children: dict[str, list[str]] = defaultdict(list)
    agents: dict[str, str | None] = {}
    callers: dict[str, str] = {}
    after: dict[str, list[str]] = defaultdict(list)
    for turn in complete:  # sources and parents come before
        sources = [] if turn.lineage is None else [name for name in turn.lineage.sources if name in agents]
        if turn.parent_id is not None:
            children[turn.parent_id].append(turn.id)
            after[turn.parent_id].append(turn.id)
            agents[turn.id] = agents.get(turn.parent_id)
        elif turn.lineage is not None and turn.lineage.kind is Segment.SUBAGENT:
            agents[turn.id] = turn.id
            if sources:
                callers[turn.id] = sources[0]
        else:
            agents[turn.id] = agents[sources[0]] if sources else None
            for name in sources:
                after[name].append(turn.id)
    for turn in complete:
        if turn.purpose == Purpose.SUMMARY and turn.parent_id is not None and not after.get(turn.id):
            after[turn.parent_id].remove(turn.id)
    last = {agents[turn.id]: turn.id for turn in complete if not after.get(turn.id)}
    for agent, name in last.items():
        if agent is not None and agent in callers:
            after[name] = list(children[callers[agent]] or after.get(callers[agent], []))
    return after


def _linear(complete: Sequence[Rewarded], rewards: Mapping[str, float], discount: float) -> dict[str, float]:
    """Returns along the order of completion of each route, which is the order of `complete`."""
    returns: dict[str, float] = {}
    future: dict[str, float] = defaultdict(float)
    for interaction in reversed(complete):
        future[interaction.route] = rewards[interaction.id] + discount * future[interaction.route]
        returns[interaction.id] = future[interaction.route]
    return returns
