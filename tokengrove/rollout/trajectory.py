"""What was said in a session, as reward functions and scorers get it: read from the server, whoever played."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokengrove.client import AsyncClient, SessionTree, TreeNode

_READ_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """A complete turn. `index` counts them from 0, in order of completion.

    `messages` are those of the request, `reply` is the assistant's message with `content` and, if any, `tool_calls`.
    `purpose` is `main` for the work of the agent itself. `agent`: the name that the turn was marked with. `reward` is
    the main one and `rewards` the named ones, as they were set when the turn was read.
    """

    interaction_id: str
    index: int
    messages: Sequence[Mapping[str, Any]]
    reply: Mapping[str, Any]
    purpose: str | None = None
    agent: str | None = None
    finish_reason: str | None = None
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """The calls of the reply, in the form of chat completions."""
        return self.reply.get("tool_calls") or ()

    @property
    def text(self) -> str:
        """The text of the reply."""
        return text_of(self.reply)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A session with its complete turns, in order of completion.

    `task` is the row of the data. `session` has the other fields of the session (`metadata`, `outcome`, ...).
    """

    session_id: str
    task: Mapping[str, Any]
    turns: Sequence[Turn]
    session: SessionTree

    @property
    def last(self) -> Turn | None:
        """The last turn of the agent itself, or the last one if none is; None without turns."""
        main = [turn for turn in self.turns if turn.purpose == "main"]
        return (main or list(self.turns) or [None])[-1]  # type: ignore[list-item]

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The conversation that ends with the last turn, its reply included."""
        return [] if (last := self.last) is None else [*last.messages, last.reply]

    @property
    def output(self) -> str:
        """The text of the last reply; empty without turns."""
        return "" if (last := self.last) is None else last.text

    @property
    def reward(self) -> float | None:
        """The sum of the main rewards of the turns; None if none was set."""
        found = [turn.reward for turn in self.turns if turn.reward is not None]
        return sum(found) if found else None

    @property
    def rewards(self) -> dict[str, float]:
        """The sum of the turns' rewards by name."""
        names = dict.fromkeys(name for turn in self.turns for name in turn.rewards)
        return {name: sum(turn.rewards.get(name, 0.0) for turn in self.turns) for name in names}


def complete(tree: SessionTree) -> list[TreeNode]:
    """The complete turns, in order of completion."""
    return [node for node in tree.interactions if node.turn is not None]


def last_of(nodes: Sequence[TreeNode]) -> list[TreeNode]:
    """The last turn of the agent itself, or the last one if none is; nothing of nothing."""
    return ([node for node in nodes if node.purpose == "main"] or list(nodes))[-1:]


async def read_tree(client: AsyncClient, session_id: str) -> SessionTree:
    """The session with the numbers of its turns and its `score`. Raises the server's errors."""
    return await client.session_tree(session_id, ["score"])


def score_of(tree: SessionTree) -> float | None:
    """The score of a session that `read_tree` read, as an export gives it; None without a reward."""
    score: float | None = tree.extra["score"]
    return score


async def read_trajectory(
    client: AsyncClient, tree: SessionTree, task: Mapping[str, Any], nodes: Iterable[TreeNode] | None = None
) -> Trajectory:
    """Read what was said in these complete turns; by default in all. Raises the server's errors."""
    room = asyncio.Semaphore(_READ_AT_ONCE)

    async def read(node: TreeNode) -> Turn:
        async with room:
            shown = await client.show_turn(tree.session_id, node.id, ["messages"])
        return _turn(shown)

    reading = [asyncio.ensure_future(read(node)) for node in (complete(tree) if nodes is None else nodes)]
    try:
        turns = await asyncio.gather(*reading)
    finally:
        for each in reading:
            each.cancel()
    return Trajectory(tree.session_id, task, turns, tree)


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, whose content may be a list of parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or () if isinstance(part, Mapping))


def _turn(shown: Mapping[str, Any]) -> Turn:
    return Turn(
        interaction_id=shown["id"],
        index=shown["turn"],
        messages=shown["messages"],
        reply=shown["output"],
        purpose=shown["purpose"],
        agent=shown["agent"],
        finish_reason=shown["finish_reason"],
        reward=shown["reward"],
        rewards=shown["rewards"],
    )
