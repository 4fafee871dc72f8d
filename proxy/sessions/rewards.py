"""Turns rewards and marks into changes by interaction id, and stores them.

Only complete interactions change. Rewards are equal in memory and in the store.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from proxy.sessions.live_session import Changes, LiveSession
from proxy.sessions.registry import Registry
from proxy.store.answer import Noted
from proxy.store.session_changes import SessionChanges
from proxy.trajectory.purpose import derive_purposes
from proxy.trajectory.routes import trained_turns
from proxy.types import Interaction
from tokengrove.errors import InvalidRequest, NotFound, brief
from tokengrove.options.model import RouteKind
from tokengrove.options.session import Purpose

# An error names at most this many turns.
_NAMED = 20


class Align(StrEnum):
    """The turns that `step_scores` belong to: all turns, or the first or last ones, as many as there are scores."""

    STRICT = "strict"
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses a complete interaction: by id, by `turn` (from 0, in order of completion), or else the last main one.
    Several may be given if they agree.

    Main turns are the work of the agent itself, not titles, summaries, sub-agents or other side calls (see
    `derive_purposes`). `agent`: the name that turns were marked with (`x-tokengrove-agent`). Only the turns of this
    agent then count, and the default is its last main turn, or its last turn if none is main. `route`: the default is
    of this route; None: of a trained route.
    """

    interaction_id: str | None = None
    turn: int | None = None
    agent: str | None = None
    route: str | None = None


def reward_turn(session: LiveSession, target: Target, value: float, name: str | None) -> Changes:
    """Set the main reward of an interaction, or with `name` a named reward. Raises NotFound, InvalidRequest."""
    interaction = _find(session, target)
    if name is None:
        return {interaction.id: {"reward": value}}
    return {interaction.id: {"rewards": {**interaction.rewards, name: value}}}


def reward_turns(session: LiveSession, rewards: Mapping[str, float]) -> Changes:
    """Set the main reward of each interaction id. Raises NotFound."""
    return {_find(session, Target(key)).id: {"reward": value} for key, value in rewards.items()}


def reward_step_scores(
    session: LiveSession, scores: Sequence[float], align: Align, agent: str | None, route: str | None
) -> Changes:
    """Set one reward per complete turn of trained routes (of `route`, if named; of `agent`, if named), in order of
    completion.

    Raises InvalidRequest if the counts do not fit, NotFound if the route or the agent has no complete turn.
    """
    complete = _turns_of(session, agent, route)
    whose = f"session {brief(session.id)}" if agent is None else f"agent {brief(agent)} in session {brief(session.id)}"
    whose = whose if route is None else f"route {brief(route)} of {whose}"
    more, turns = len(complete) - len(scores), f"the {len(complete)} complete turns of {whose}"
    if more < 0 or (more and align is Align.STRICT):
        way_out = "" if more < 0 else "; with 'align': first or last they belong to the first or last turns"
        raise InvalidRequest(
            f"'step_scores' has {len(scores)} scores for {turns}: {_named_turns(complete)}{way_out}",
            param="step_scores",
        )
    chosen = complete[more:] if align is Align.LAST else complete[: len(scores)]
    return {interaction.id: {"reward": score} for interaction, score in zip(chosen, scores, strict=True)}


def reward_whole(session: LiveSession, score: float, changes: Changes) -> Changes:
    """Add the score of the whole session to `changes` if no turn has a main reward, so that returns include it.

    It becomes the reward of the last main turn of a trained route, or of its last turn if none is main. Without turns,
    nothing is added.
    """
    complete = trained_turns(session.complete())
    if any("reward" in change for change in changes.values()) or any(turn.reward is not None for turn in complete):
        return changes
    if not complete:
        return changes
    last = _last_of(complete).id
    return {**changes, last: {**changes.get(last, {}), "reward": score}}


def reward_tokens(session: LiveSession, target: Target, values: Sequence[float]) -> Changes:
    """Set one reward per output token. Raises InvalidRequest if the lengths differ."""
    interaction = _find(session, target)
    if len(values) != len(interaction.output_ids):
        raise InvalidRequest(
            f"'token_rewards' has {len(values)} values, but interaction {interaction.id} has "
            f"{len(interaction.output_ids)} output tokens",
            param="token_rewards",
        )
    return {interaction.id: {"token_rewards": array("f", values)}}


def mark_turn(
    session: LiveSession, target: Target, trainable: bool, spans: Sequence[tuple[int, int]] | None
) -> Changes:
    """Set whether an interaction is trained, and which ranges [start, end) of its output tokens (None: all).

    Raises InvalidRequest for a range that is empty or outside the output, and for an output without logprobs or of a
    route that is not trained.
    """
    interaction = _find(session, target)
    if trainable and interaction.route_kind is not RouteKind.POLICY:
        raise InvalidRequest(
            f"this turn is of route {brief(interaction.route)}, which is {interaction.route_kind} and never trained",
            param="trainable",
        )
    if trainable and not interaction.has_logprobs:
        raise InvalidRequest(
            "this output has no logprobs, so no importance ratio can be computed; it can only be context",
            param="trainable",
        )
    length = len(interaction.output_ids)
    for at, (start, end) in enumerate(spans or ()):
        if not 0 <= start < end <= length:
            raise InvalidRequest(
                f"'spans[{at}]' is [{start}, {end}), which is not a range within the {length} output tokens",
                param=f"spans[{at}]",
            )
    return {interaction.id: {"trainable": trainable, "spans": tuple(spans or ())}}


def has_rewards(session: LiveSession, changes: Changes) -> bool:
    """Whether the interactions already have all rewards of `changes`."""
    nodes = session.cache.nodes
    return all(
        getattr(nodes[interaction_id].interaction, name) == value
        for interaction_id, change in changes.items()
        for name, value in change.items()
    )


def last_rewarded(
    session: LiveSession, field: str, name: str | None, agent: str | None, route: str | None
) -> str | None:
    """The id of the last complete turn with a value in `field`, or with a reward called `name`; None if none has it.

    `agent` and `route`: only their turns count; without a route, those of trained ones. Raises NotFound if the agent or
    the route has no complete turn.
    """
    for interaction in reversed(_turns_of(session, agent, route)):
        if (getattr(interaction, field) if name is None else interaction.rewards.get(name)) is not None:
            return interaction.id
    return None


def _find(session: LiveSession, target: Target) -> Interaction:
    found = _find_any(session, target)
    if target.agent is not None and found.agent != target.agent:
        given = "turn" if target.interaction_id is None else "interaction_id"
        whose = "no named agent" if found.agent is None else f"agent {brief(found.agent)}"
        raise InvalidRequest(f"'{given}' names a turn of {whose}, not of 'agent' {brief(target.agent)}", param="agent")
    if target.route is not None and found.route != target.route:
        given = "turn" if target.interaction_id is None else "interaction_id"
        whose = f"route {brief(found.route)}" if found.route else "no named route"
        raise InvalidRequest(f"'{given}' names a turn of {whose}, not of 'route' {brief(target.route)}", param="route")
    return found


def _find_any(session: LiveSession, target: Target) -> Interaction:
    interaction_id = target.interaction_id
    if interaction_id is None:
        return _find_turn(session, target.turn, target.agent, target.route)
    node = session.cache.nodes.get(interaction_id)
    if node is None or node.interaction.seq < 0:
        raise NotFound(
            f"session {brief(session.id)} has no complete interaction {brief(interaction_id)}", param="interaction_id"
        )
    if target.turn is not None and (named := _find_turn(session, target.turn)) is not node.interaction:
        raise InvalidRequest(
            f"'turn' {target.turn} is {named.id}, not 'interaction_id' {interaction_id}: give one of them", param="turn"
        )
    return node.interaction


def _find_turn(
    session: LiveSession, turn: int | None, agent: str | None = None, route: str | None = None
) -> Interaction:
    if turn is None and agent is not None:
        return _last_of(_turns_of(session, agent, route))
    complete = _turns_of(session, None, route) if turn is None else session.complete()
    if not complete:
        field = "interaction_id" if turn is None else "turn"
        raise InvalidRequest(f"session {brief(session.id)} has no complete interaction to reward", param=field)
    if turn is None:
        return _last_main(session, complete)
    if turn >= len(complete):
        raise NotFound(
            f"session {brief(session.id)} has no turn {turn}: its complete turns are 0 to {len(complete) - 1}",
            param="turn",
        )
    return complete[turn]


def _last_main(session: LiveSession, complete: Sequence[Interaction]) -> Interaction:
    purposes = derive_purposes(complete)
    for interaction in reversed(complete):
        if purposes[interaction.id] == Purpose.MAIN:
            return interaction
    raise InvalidRequest(
        f"session {brief(session.id)} has no complete turn of the main agent to reward: name one by 'turn' or "
        f"'interaction_id'; it has {_named_turns(complete)}",
        param="interaction_id",
    )


def _turns_of(session: LiveSession, agent: str | None, route: str | None) -> Sequence[Interaction]:
    """The complete turns of a route (None: of trained routes), of those that were marked with an agent, if named.

    Raises NotFound, which lists the routes or the agents of the session.
    """
    complete = _turns_of_route(session, route)
    if agent is None:
        return complete
    if found := [interaction for interaction in complete if interaction.agent == agent]:
        return found
    counts = Counter(interaction.agent for interaction in complete)
    unnamed = counts.pop(None, 0)
    listed = [f"{brief(name)} ({count} {_turns(count)})" for name, count in list(counts.items())[:_NAMED]]
    listed += ["..."] if len(counts) > _NAMED else []
    listed += [f"{unnamed} {_turns(unnamed)} without an agent"] if unnamed else []
    raise NotFound(
        f"session {brief(session.id)} has no complete turn of agent {brief(agent)}; it has "
        f"{', '.join(listed) or 'no turn yet'}",
        param="agent",
    )


def _turns_of_route(session: LiveSession, route: str | None) -> Sequence[Interaction]:
    """The complete turns of a route; None: of trained routes. Raises NotFound, which lists the session's routes."""
    complete = session.complete()
    if route is None:
        return trained_turns(complete)
    if found := [interaction for interaction in complete if interaction.route == route]:
        return found
    counts = Counter(interaction.route for interaction in complete if interaction.route)
    listed = ", ".join(f"{brief(name)} ({count} {_turns(count)})" for name, count in counts.items())
    raise NotFound(
        f"session {brief(session.id)} has no complete turn of route {brief(route)}; it has "
        f"{listed or 'no named route'}",
        param="route",
    )


def _turns(count: int) -> str:
    return "turn" if count == 1 else "turns"


def _last_of(turns: Sequence[Interaction]) -> Interaction:
    """The last main turn of `turns`, or the last turn if none is main. Purposes are derived from `turns` only."""
    purposes = derive_purposes(turns)
    return next((turn for turn in reversed(turns) if purposes[turn.id] == Purpose.MAIN), turns[-1])


def _named_turns(complete: Sequence[Interaction]) -> str:
    """The turns with their purposes and ids, for an error."""
    purposes = derive_purposes(complete)
    named = [f"{turn} ({purposes[one.id]}, {one.id})" for turn, one in enumerate(complete[:_NAMED])]
    if len(complete) > _NAMED:
        named.append(f"and so on to {len(complete) - 1} ({purposes[complete[-1].id]}, {complete[-1].id})")
    return ", ".join(named) or "none"


class Scores:
    """Writes rewards and marks."""

    def __init__(self, registry: Registry, changes: SessionChanges) -> None:
        self._registry, self._changes = registry, changes

    async def set_rewards(self, session: LiveSession, changes: Changes, noted: Noted | None = None) -> bool:
        """Set raw rewards and marks. Return False, with nothing set, if another replica changed the session meanwhile.

        The session is then refreshed, and the caller decides on the changes again. `noted`: see `SessionChanges`.
        """
        done = await self._changes.set_rewards(session.id, changes, self._registry.seen(session), noted)
        if self._registry.shared:
            await self._registry.refresh(session)
        else:
            session.reward(changes)
        return done
