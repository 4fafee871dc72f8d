"""The content of a session for reward functions and scorers, read from the server."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokengrove.client import AsyncClient, SessionTree, TreeNode

_CONTENT = "added"


@dataclass(frozen=True, slots=True)
class Turn:
    """A complete turn. `index` counts complete turns from 0, in order of completion.

    `messages`: the messages of the request. `reply`: the assistant's message, with `content` and, if any, `tool_calls`.
    `next_messages`: what was sent after the reply, that is, the messages which the first turn that continues this one
    added: of the user, or the results of tools. Empty while no turn continues it.
    `purpose`: `main` for the work of the agent itself. `agent`: the agent's name that marks the turn. `reward` is the
    main reward and `rewards` are the named rewards, as they were set when the turn was read.
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
    next_messages: Sequence[Mapping[str, Any]] = ()

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls of the reply, in the format of chat completions."""
        return self.reply.get("tool_calls") or ()

    @property
    def text(self) -> str:
        """The text of the reply."""
        return text_of(self.reply)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A session with its complete turns, in order of completion.

    `task`: the row of the data. `session`: the other fields of the session (`metadata`, `outcome`, ...).
    """

    session_id: str
    task: Mapping[str, Any]
    turns: Sequence[Turn]
    session: SessionTree

    @property
    def last(self) -> Turn | None:
        """The last turn with the purpose `main`, or the last turn if no turn has it; None without turns."""
        main = [turn for turn in self.turns if turn.purpose == "main"]
        return (main or list(self.turns) or [None])[-1]  # type: ignore[list-item]

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The conversation that ends with the last turn, including its reply."""
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
        """The sums of the turns' named rewards."""
        names = dict.fromkeys(name for turn in self.turns for name in turn.rewards)
        return {name: sum(turn.rewards.get(name, 0.0) for turn in self.turns) for name in names}


def complete(tree: SessionTree) -> list[TreeNode]:
    """The complete turns of trained routes, in order of completion."""
    return [node for node in tree.interactions if node.is_step]


def last_of(nodes: Sequence[TreeNode]) -> list[TreeNode]:
    """The last turn with the purpose `main`, or the last turn if no turn has it, as a list; empty without turns."""
    return ([node for node in nodes if node.purpose == "main"] or list(nodes))[-1:]


async def read_tree(client: AsyncClient, session_id: str) -> SessionTree:
    """The session with the rewards and token counts of its turns, and its `score`. Raises the server's errors."""
    return await client.session_tree(session_id, ["score"])


def score_of(tree: SessionTree) -> float | None:
    """The score of a session that `read_tree` returned, as in an export; None without a reward."""
    score: float | None = tree.extra["score"]
    return score


async def read_trajectory(
    client: AsyncClient, tree: SessionTree, task: Mapping[str, Any], nodes: Iterable[TreeNode] | None = None
) -> Trajectory:
    """Read the content of these complete turns; None: of all. Raises the server's errors."""
    read = await client.session_tree(tree.session_id, [_CONTENT])
    wanted = {node.id for node in (complete(tree) if nodes is None else nodes)}
    return replace(trajectory_of(read, task, wanted), session=tree)


async def read_whole(client: AsyncClient, session_id: str) -> SessionTree:
    """The session as `read_tree` reads it, and with what `trajectory_of` needs. Raises the server's errors."""
    return await client.session_tree(session_id, ["score", _CONTENT])


def trajectory_of(tree: SessionTree, task: Mapping[str, Any], wanted: Collection[str] | None = None) -> Trajectory:
    """The trajectory of a session with content. `wanted`: the ids of its turns; None: all."""
    conversations, following = _conversations(tree), _following(tree)
    turns = [
        _turn(node, conversations[node.id], following.get(node.id, ()))
        for node in complete(tree)
        if wanted is None or node.id in wanted
    ]
    return Trajectory(tree.session_id, task, turns, tree)


def _conversations(tree: SessionTree) -> dict[str, list[Mapping[str, Any]]]:
    """The messages of the request of each complete turn, by its id. Parents come before their children."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    replies: dict[str, Mapping[str, Any]] = {}
    for node in tree.interactions:
        if node.turn is not None and node.added is not None:
            above = [] if node.parent_id is None else [*found[node.parent_id], replies[node.parent_id]]
            found[node.id], replies[node.id] = [*above, *node.added["messages"]], node.added["output"]
    return found


def _following(tree: SessionTree) -> dict[str, Sequence[Mapping[str, Any]]]:
    """What the first complete turn below each turn added, by the id of the turn above."""
    found: dict[str, Sequence[Mapping[str, Any]]] = {}
    for node in tree.interactions:
        if node.turn is not None and node.parent_id is not None and node.added is not None:
            found.setdefault(node.parent_id, node.added["messages"])
    return found


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, whose content may be a list of parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or () if isinstance(part, Mapping))


def _turn(node: TreeNode, messages: Sequence[Mapping[str, Any]], following: Sequence[Mapping[str, Any]]) -> Turn:
    assert node.turn is not None and node.added is not None
    return Turn(
        interaction_id=node.id,
        index=node.turn,
        messages=messages,
        reply=node.added["output"],
        purpose=node.purpose,
        agent=node.agent,
        finish_reason=node.finish_reason,
        reward=None if node.reward is None else float(node.reward),
        rewards=node.rewards,
        next_messages=following,
    )
