"""Exports recomputed from the raw tables with sqlite3 and numpy only; no code of `proxy` is used.

It works token by token: each token of a sample records whose output it is, and is trained in the first sample that
contains it.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Body = Mapping[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Node:
    """A row of `interactions` with its binary columns decoded."""

    id: str
    seq: int
    parent: str | None
    aligned: bool
    reason: str
    status: str
    prefix_length: int
    suffix: np.ndarray
    output: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    reward: float | None
    rewards: dict[str, float]
    token_rewards: np.ndarray | None
    trainable: bool
    spans: list[list[int]]
    state_hash: str | None
    purpose: str | None
    agent: str | None
    sampling: dict[str, Any]
    grammar: bool
    has_logprobs: bool
    logprobs_of: str
    begun: float
    ended: float


@dataclass(frozen=True)
class Stored:
    """A row of `sessions` with its interactions. `nodes`: the complete interactions by id, in order of seq."""

    session_id: str
    group: Any
    discount: float
    credit: str
    status: str
    finished: bool | None
    outcome: str | None
    metrics: dict[str, Any]
    every: list[Node]
    returns: dict[tuple[str, float, str], float]

    @property
    def nodes(self) -> dict[str, Node]:
        return {node.id: node for node in self.every if node.status == "complete"}

    def children(self, parent: Node) -> list[Node]:
        return [node for node in self.nodes.values() if node.parent == parent.id]

    def depth(self, node: Node) -> int:
        return 0 if node.parent is None else 1 + self.depth(self.nodes[node.parent])


def read_sessions(path: Path) -> list[Stored]:
    """Read all sessions of a SQLite file, oldest first."""
    connection = sqlite3.connect(path)
    connection.row_factory = sqlite3.Row
    try:
        rows = connection.execute("SELECT * FROM sessions ORDER BY number").fetchall()
        return [_session(connection, row) for row in rows]
    finally:
        connection.close()


def _session(connection: sqlite3.Connection, row: sqlite3.Row) -> Stored:
    name = row["session_id"]
    nodes = connection.execute("SELECT * FROM interactions WHERE session_id = ? ORDER BY seq", [name]).fetchall()
    values = connection.execute(
        "SELECT r.* FROM returns r JOIN interactions i ON i.id = r.interaction_id WHERE i.session_id = ?", [name]
    )
    return Stored(
        session_id=name,
        group=row["group_id"] or ("alone", name),
        discount=row["discount"],
        credit=row["credit"],
        status=row["status"],
        finished=None if row["finished"] is None else bool(row["finished"]),
        outcome=row["outcome"],
        metrics=_json(row["metrics"]) or {},
        every=[_node(each) for each in nodes],
        returns={(each["interaction_id"], each["discount"], each["credit"]): each["value"] for each in values},
    )


def _node(row: sqlite3.Row) -> Node:
    runs = _json(row["versions"]) or []
    tokens = row["token_rewards"]
    return Node(
        id=row["id"],
        seq=row["seq"],
        parent=row["parent_id"],
        aligned=bool(row["aligned"]),
        reason=row["reason"],
        status=row["status"],
        prefix_length=row["prefix_length"],
        suffix=np.frombuffer(row["prompt_suffix"], "<i4"),
        output=np.frombuffer(row["output_ids"], "<i4"),
        logprobs=np.frombuffer(row["logprobs"], "<f4"),
        versions=np.array([version for count, version in runs for _ in range(count)], np.int32),
        reward=row["reward"],
        rewards=_json(row["rewards"]) or {},
        token_rewards=None if tokens is None else np.frombuffer(tokens, "<f4"),
        trainable=bool(row["trainable"]),
        spans=_json(row["spans"]) or [],
        state_hash=row["state_hash"],
        purpose=row["purpose"],
        agent=row["agent"],
        sampling=_json(row["sampling"]) or {},
        grammar=(_json(row["notes"]) or {}).get("grammar", False),
        has_logprobs=(_json(row["notes"]) or {}).get("sampled", True),
        logprobs_of=(_json(row["notes"]) or {}).get("logprobs_of", "rule"),
        begun=row["created_at"],
        ended=row["completed_at"] or 0.0,
    )


def _json(data: bytes | None) -> Any:
    if data is None:
        return None
    return json.loads(zlib.decompress(data[1:]) if data[:1] in b"zZ" else data[1:])


def main_reward(stored: Stored, node: Node, body: Body) -> float | None:
    """Return the reward that an export uses. A metric counts for the last rewarded, or main, turn."""
    granularity, nodes = body.get("reward_granularity"), list(stored.nodes.values())
    name = granularity or body.get("reward_name")
    if name in stored.metrics and (granularity or not any(name in each.rewards for each in nodes)):
        rewarded = [each for each in nodes if each.reward is not None]
        main = [each for each in nodes if each.purpose == "main"]
        return stored.metrics[name] if node is (rewarded or main or nodes)[-1] else None
    return node.rewards.get(name or "", node.reward)


def returns(stored: Stored, body: Body) -> dict[str, float]:
    """Compute returns by definition: reward plus discounted mean of the children's, or a sum in order of seq."""
    discount = stored.discount if body.get("discount") is None else body["discount"]
    credit, nodes = body.get("credit") or stored.credit, list(stored.nodes.values())
    rewards = [main_reward(stored, node, body) or 0.0 for node in nodes]
    if credit == "linear":
        sums = [
            sum(reward * discount**later for later, reward in enumerate(rewards[first:])) for first in range(len(nodes))
        ]
        return {node.id: value for node, value in zip(nodes, sums, strict=True)}

    def value(node: Node) -> float:
        below = [value(child) for child in stored.children(node)]
        return (main_reward(stored, node, body) or 0.0) + discount * (float(np.mean(below)) if below else 0.0)

    return {node.id: value(node) for node in nodes}


@dataclass(frozen=True)
class Tokens:
    """`ids` [L]; `owner` [L]: the seq of the node that sampled each token (-1: context); `at` [L]: its output index."""

    ids: np.ndarray
    owner: np.ndarray
    at: np.ndarray


def tokens(stored: Stored, node: Node) -> Tokens:
    """Return the prompt and output of a node."""
    pieces: list[Tokens] = []
    if node.aligned:
        assert node.parent is not None
        pieces.append(tokens(stored, stored.nodes[node.parent]))
        assert len(pieces[0].ids) == node.prefix_length
    else:
        assert node.prefix_length == 0
    context, output = len(node.suffix), len(node.output)
    pieces.append(Tokens(node.suffix, np.full(context, -1), np.full(context, -1)))
    pieces.append(Tokens(node.output, np.full(output, node.seq), np.arange(output)))
    return Tokens(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("ids", "owner", "at")))


def chain(stored: Stored, node: Node) -> list[Node]:
    """Return the nodes whose tokens a node's sequence contains, oldest first."""
    above = chain(stored, stored.nodes[node.parent]) if node.aligned and node.parent else []
    return [*above, node]


def selected(stored: Stored, body: Body) -> list[Node]:
    """Return the nodes that the filter keeps."""
    wanted = body.get("filter", {})
    agents, purposes = _names(wanted.get("agent")), _names(wanted.get("purpose"))
    return [
        node
        for node in stored.nodes.values()
        if (agents is None or node.agent in agents) and (purposes is None or node.purpose in purposes)
    ]


def _names(value: Any) -> list[str] | None:
    return [value] if isinstance(value, str) else value


def reason_against(stored: Stored, node: Node, at: int, body: Body) -> str | None:
    """Return why no sample may train an output token, in the order of the documented table; None if one may."""
    marked = node.trainable and (not node.spans or any(first <= at < end for first, end in node.spans))
    against = {
        "filter": node.id not in [each.id for each in selected(stored, body)],
        "no_logprobs": not node.has_logprobs,
        "unfinished": bool(body.get("mask_unfinished")) and stored.finished is False,
        "train": not is_chosen(stored, node, body),
        "mark": not marked,
        "logprobs": node.logprobs_of != "rule" and body.get("train", {}).get("logprobs") == "rule",
        "grammar": node.grammar and not body.get("train", {}).get("constrained"),
        "stale": body.get("stale") == "mask" and node.versions[at] < body["filter"]["min_version"],
    }
    return next((reason for reason, holds in against.items() if holds), None)


def may_train(stored: Stored, node: Node, body: Body) -> np.ndarray:
    """Return bool [output]: the tokens of an output that a sample may train."""
    return np.array([reason_against(stored, node, at, body) is None for at in range(len(node.output))], bool)


def not_recomputable(node: Node, context_cut: bool) -> str | None:
    """Return the documented reason why a forward pass over the sample does not give the logprobs of a turn."""
    sampling = node.sampling
    penalties = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    reasons = {
        "cut": context_cut,
        "grammar": node.grammar,
        "sampled": node.logprobs_of == "sampled",
        "bias": node.logprobs_of != "model" and bool(sampling.get("logit_bias")),
        "penalties": node.logprobs_of != "model"
        and any(sampling.get(name, off) != off for name, off in penalties.items()),
        "model": node.logprobs_of == "model",
        "truncated": sampling.get("top_p", 1) < 1 or sampling.get("top_k", 0) > 0 or sampling.get("min_p", 0) > 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def furthest(words: Iterable[str]) -> str:
    """Return the documented word that is the furthest from the rule."""
    return max(words, key=("rule", "sampled", "model").index, default="rule")


def is_chosen(stored: Stored, node: Node, body: Body) -> bool:
    """Return whether `train` selects a turn."""
    train, turns = body.get("train", {}), body.get("train", {}).get("turns", "all")
    return (
        node.id not in train.get("exclude", [])
        and ("agents" not in train or node.agent in train["agents"])
        and ("purposes" not in train or node.purpose in train["purposes"])
        and (turns == "all" or (not stored.children(node) if turns == "last" else stored.depth(node) in turns))
    )


ALL = ...
"""Stands for the agent where scores of all agents are compared with each other."""


class Scores:
    """The scores of a session, by the rules of docs/concepts.md."""

    def __init__(self, stored: Stored, body: Body) -> None:
        self.stored, self.body = stored, body
        self.kept = selected(stored, body)
        self.paths = {leaf.id: [node.id for node in chain(stored, leaf)] for leaf in leaves(stored, self.kept)}
        pairs = self._pairs()
        together = {self._choices(one, other) for one, other in pairs}
        overlaps = any(self._overlap(one, other) for one, other in pairs)
        successive = any(not self._overlap(one, other) for one, other in pairs)
        self.scope = body.get("reward_scope", "path" if overlaps or True in together else "session")
        self.siblings = self.scope == "path" and bool(pairs)
        self.warns = "reward_scope" not in body and (
            any(self._overlap(one, other) and not self._choices(one, other) for one, other in pairs)
            or (successive and not overlaps and True not in together)
        )
        self.by_agent = body.get("reward_scope") == "agent"
        compares = "advantages" in body or "step_advantages" in body
        self.skips = body.get("unrewarded", "skip" if compares else "zero") == "skip"

    def _sum(self, names: Iterable[str]) -> float | None:
        found = [main_reward(self.stored, self.stored.nodes[name], self.body) for name in sorted(set(names))]
        given = [reward for reward in found if reward is not None]
        return sum(given) if given else None

    def path(self, leaf: str) -> float | None:
        return self._sum(self.paths[leaf])

    @property
    def session(self) -> float | None:
        """Each reward of the exported paths once; those of all turns if these have none. Siblings: a mean."""
        if self.siblings:
            return _mean([self.path(leaf) for leaf in self.paths])
        score = self._sum(name for names in self.paths.values() for name in names)
        return self._sum(self.stored.nodes) if score is None else score

    def _pairs(self) -> list[tuple[Node, Node]]:
        """Return all two answers to one prompt that have rewards, each on itself or below it."""
        nodes = [node for node in self.stored.nodes.values() if self._rewarded(node)]
        pairs = []
        for first, one in enumerate(nodes):
            same = [each for each in nodes if (each.parent, each.state_hash) == (one.parent, one.state_hash)]
            again = any(each.reason in ("resampled", "template", "drift") for each in same)
            for other in nodes[first + 1 :]:
                if other in same and (again or self._choices(one, other)):
                    pairs.append((one, other))
        return pairs

    def _choices(self, one: Node, other: Node) -> bool:
        return one.id.split(".")[0] == other.id.split(".")[0]

    def _overlap(self, one: Node, other: Node) -> bool:
        earlier, later = sorted((one, other), key=lambda node: node.begun)
        return later.begun < earlier.ended

    def _rewarded(self, node: Node) -> bool:
        own = main_reward(self.stored, node, self.body) is not None
        return own or any(self._rewarded(child) for child in self.stored.children(node))

    @property
    def left_out(self) -> str | None:
        if not self.skips:
            return None
        if self.stored.status == "active":
            return "active"
        if self.stored.outcome == "Failed":
            return "failed"
        return "unrewarded" if self.of(self.stored.nodes) is None else None

    def ends(self, names: Iterable[str]) -> list[str]:
        """Return the paths on which a sample with these turns stands."""
        return [leaf for leaf, path in self.paths.items() if set(path) & set(names)]

    def of(self, names: Iterable[str], leaf: str | None = None) -> float | None:
        """Return the score of a sample with these turns, or of the path that ends with `leaf`."""
        if self.scope == "session":
            return self.session
        if self.scope == "agent":
            return _mean([self.agent(agent) for agent in self.agents([leaf] if leaf else names)])
        return _mean([self.path(end) for end in ([leaf] if leaf else self.ends(names))])

    def agent(self, agent: str | None) -> float | None:
        """Return the score of an agent: the sum over its turns on the exported paths."""
        return self._sum(name for path in self.paths.values() for name in path if self.named(name) == agent)

    def agents(self, names: Iterable[str]) -> set[str | None]:
        """Return the agents of these turns that have a score: those that are on an exported path."""
        exported = {name for path in self.paths.values() for name in path}
        return {self.named(name) for name in names if name in exported}

    def named(self, name: str) -> str | None:
        return self.stored.nodes[name].agent

    def values(self, names: Iterable[str], leaf: str | None = None) -> list[tuple[Any, float]]:
        """Return what is compared of a sample with these turns, or of the path that ends with `leaf`, and the agent
        with whose scores it is compared: scores with a turn that the filter keeps and `train` selects."""
        trained = {node.id for node in self.kept if is_chosen(self.stored, node, self.body)}
        counted = [end for end, path in self.paths.items() if trained & set(path)]
        found: list[tuple[Any, float | None]]
        if self.scope == "session":
            found = [(ALL, self.session)] if counted else []
        elif self.scope == "agent":
            asked = self.agents([leaf] if leaf else names) & self.agents(trained)
            found = [(agent, self.agent(agent)) for agent in asked]
        else:
            ends = [end for end in ([leaf] if leaf else self.ends(names)) if end in counted]
            found = [(self.named(end) if self.by_agent else ALL, self.path(end)) for end in ends]
        return [(agent, value or 0.0) for agent, value in found if value is not None or not self.skips]

    def state(self, name: str) -> Any:
        """Return what turns have in common that are compared as steps."""
        return self.stored.group, self.stored.nodes[name].state_hash, self.named(name) if self.by_agent else ALL

    def steps(self) -> dict[str, float]:
        """Return the returns of the turns that are compared."""
        values = {} if self.left_out else returns(self.stored, self.body)
        counted = [node for node in self.kept if is_chosen(self.stored, node, self.body)]
        rewarded = [node.id for node in counted if not self.skips or self.of([node.id]) is not None]
        return {name: value for name, value in values.items() if name in rewarded}


def _agent_scores(scores: Scores) -> dict[str, Any]:
    found = {agent or "": scores.agent(agent) for agent in scores.agents(scores.stored.nodes)}
    return {agent: None if score is None else pytest.approx(score) for agent, score in found.items()}


def _mean(values: list[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return float(np.mean(given)) if given else None


class Fates:
    """What becomes of each output token: `seen` has, by (seq, index), the best that a sample did with it."""

    ORDER = ("drift", "unrewarded", "too_long", "cut", "stale", "trained")

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], str] = {}
        self.stale_samples = self.dropped_samples = self.unrewarded_samples = 0

    def note(self, token: tuple[int, int], fate: str) -> None:
        before = self.seen.get(token, "drift")
        self.seen[token] = max(before, fate, key=self.ORDER.index)

    def leave_out(self, outputs: list[tuple[int, int]]) -> None:
        for token in outputs:
            self.note(token, "unrewarded")

    def trains(self, stored: Stored, node: Node, body: Body) -> bool:
        """Return whether a sample trains a token of an output."""
        allowed = may_train(stored, node, body)
        return any(may and self.seen[node.seq, at] == "trained" for at, may in enumerate(allowed))

    def counts(self, stored: Stored, body: Body) -> Row:
        """Return the documented counts of the session's entry."""
        ends: list[str] = []
        stale: set[str] = set()
        for node in stored.nodes.values():
            for at in range(len(node.output)):
                end = reason_against(stored, node, at, body) or self.seen[node.seq, at]
                ends.append(end)
                stale |= {node.id} if end == "stale" else set()
        out: Row = {
            "sampled_tokens": len(ends),
            "trained_tokens": ends.count("trained"),
            "untrained_tokens": {name: ends.count(name) for name in set(ends) - {"trained"}},
        }
        if self.unrewarded_samples:
            out["unrewarded_samples"] = self.unrewarded_samples
        if body.get("layout") == "padded":
            out["dropped_samples"] = self.dropped_samples
        if {"min_version", "max_version_span"} & set(body.get("filter", {})):
            tree = body.get("layout") == "tree"
            out["stale_turns" if tree else "stale_samples"] = len(stale) if tree else self.stale_samples
        return out


def too_stale(versions: Any, body: Body, limits: tuple[str, ...] = ("min_version", "max_version_span")) -> bool:
    """Return whether trained tokens of these weight versions are outside the limits."""
    wanted, versions = body.get("filter", {}), list(versions)
    if not versions:
        return False
    old = "min_version" in limits and min(versions) < (wanted.get("min_version") or 0)
    span = wanted.get("max_version_span") if "max_version_span" in limits else None
    return old or (span is not None and max(versions) - min(versions) > span)


def samples(stored: Stored, body: Body, groups: Groups | None = None, fates: Fates | None = None) -> list[Row]:
    """Compute the samples of a session in the order of the export, and what becomes of its tokens in `fates`."""
    layout, scores, fates = body.get("layout", "concat"), Scores(stored, body), fates or Fates()
    if scores.left_out:
        rows: list[Row] = []
        for node in stored.nodes.values():
            fates.leave_out(_outputs(tokens(stored, node)))
    elif layout == "tree":
        rows = _tree(stored, body, fates)
    elif layout == "individual":
        rows = []
        for node in scores.kept:
            if scores.skips and scores.of([node.id]) is None:
                fates.leave_out([(node.seq, at) for at in range(len(node.output))])
                fates.unrewarded_samples += 1
            else:
                rows += _admitted(stored, node, body, None, fates)
    else:
        rows = _joined(stored, body, fates)
    training = sum(bool(row["loss_mask"].any()) for row in rows)
    for row in rows:
        row["weight"] = [1 / training if row["loss_mask"].any() else 0.0]
        if groups is not None:
            row.update(groups.of(stored, row))
        names = row["interaction_ids"]
        row["score"] = scores.of(names, names[-1] if layout in ("concat", "padded") else None)
        row["rewarded"], row["reward_scope"] = row["score"] is not None, scores.scope
    return rows


def _joined(stored: Stored, body: Body, fates: Fates) -> list[Row]:
    """Return one sample per leaf."""
    kept, scores = selected(stored, body), Scores(stored, body)
    rows: list[Row] = []
    for leaf in leaves(stored, kept):
        standing = tokens(stored, leaf)
        if scores.skips and scores.of([leaf.id], leaf.id) is None:
            fates.leave_out(_outputs(standing))
            fates.unrewarded_samples += 1
            continue
        if body.get("layout") == "padded" and not _fits(stored, leaf, body):
            fates.dropped_samples += 1
            for token in _outputs(standing):
                fates.note(token, "too_long")
            continue
        padded = _Padded.of(standing, body) if body.get("layout") == "padded" else None
        rows += _admitted(stored, leaf, body, padded, fates)
    return rows


def leaves(stored: Stored, kept: list[Node]) -> list[Node]:
    """Return the kept nodes that no kept node continues, in order of seq."""
    found = [node for node in kept if not any(other.parent == node.id and other.aligned for other in kept)]
    return sorted(found, key=lambda node: node.seq)


def _outputs(standing: Tokens) -> list[tuple[int, int]]:
    pairs = zip(standing.owner.tolist(), standing.at.tolist(), strict=True)
    return [(seq, at) for seq, at in pairs if seq >= 0]


def _admitted(stored: Stored, leaf: Node, body: Body, padded: _Padded | None, fates: Fates) -> list[Row]:
    """Return the sample that ends with a node, or none if what it would train is too stale."""
    single = body.get("layout", "concat") == "individual"
    standing = tokens(stored, leaf)
    there = np.ones(len(standing.ids), bool) if padded is None else padded.there(len(standing.ids))
    path = [leaf] if single else chain(stored, leaf)
    trained = {token for token, fate in fates.seen.items() if fate == "trained"}
    row = _columns(stored, standing, path, body, {node.seq for node in selected(stored, body)}, trained, there)
    ours = {node.seq for node in path}
    stale = too_stale(row["versions"][row["loss_mask"] == 1], body)
    for (seq, at), present in zip(zip(standing.owner.tolist(), standing.at.tolist(), strict=True), there, strict=True):
        if seq in ours:
            fates.note((seq, at), "cut" if not present else "stale" if stale else "trained")
    if stale:
        fates.stale_samples += 1
        return []
    total = returns(stored, body)[leaf.id] if single else Scores(stored, body).of([], leaf.id) or 0.0
    row["rewards"], row["raw_rewards"] = [total], [main_reward(stored, leaf, body) or 0.0]
    return [row if padded is None else padded.lay_out(row, body)]


def _columns(
    stored: Stored,
    standing: Tokens,
    path: list[Node],
    body: Body,
    kept: set[int],
    done: set[tuple[int, int]],
    there: np.ndarray,
) -> Row:
    """Compute the columns token by token. `done`: the output tokens that earlier samples train. `there` [L]: the tokens
    that are not cut off."""
    length, values = len(standing.ids), returns(stored, body)
    row = {
        "input_ids": standing.ids,
        "loss_mask": np.zeros(length, np.int32),
        "logprobs": np.zeros(length, np.float32),
        "versions": np.full(length, -1, np.int32),
        "turn_ids": np.full(length, -1, np.int32),
        "attention_mask": np.ones(length, bool),
    }
    rewards = np.zeros(length, np.float32)
    by_seq = {node.seq: (turn, node, may_train(stored, node, body)) for turn, node in enumerate(path)}
    for place, (seq, at) in enumerate(zip(standing.owner.tolist(), standing.at.tolist(), strict=True)):
        if seq not in by_seq or not there[place]:
            continue  # context
        turn, node, allowed = by_seq[seq]
        if node.token_rewards is not None:
            rewards[place] = node.token_rewards[at]
        if seq in kept and allowed[at] and (seq, at) not in done:
            row["loss_mask"][place] = 1
            row["logprobs"][place] = node.logprobs[at]
            row["versions"][place] = node.versions[at]
            row["turn_ids"][place] = turn
    spans = [np.flatnonzero((standing.owner == node.seq) & there) for node in path]
    if any(node.token_rewards is not None and len(where) for node, where in zip(path, spans, strict=True)):
        row["token_rewards"] = rewards
    row["interaction_ids"] = [node.id for node in path]
    row["logprobs_of"] = furthest(node.logprobs_of for turn, node in enumerate(path) if turn in row["turn_ids"])
    row["turns"] = [
        {
            "interaction_id": node.id,
            "reward": main_reward(stored, node, body),
            "return": values[node.id],
            "span": _span(where),
            "logprobs_of": node.logprobs_of,
            "recomputable": not_recomputable(node, not len(where) or not there[: where[0]].all()),
        }
        for node, where in zip(path, spans, strict=True)
    ]
    return row


def _span(where: np.ndarray) -> list[int] | None:
    return [int(where[0]), int(where[-1]) + 1] if len(where) else None


def _tree(stored: Stored, body: Body, fates: Fates) -> list[Row]:
    """Return the one sample of layout tree: without turns that are too old, then without paths that span too much."""
    recent = []
    for node in selected(stored, body):
        old = too_stale(node.versions[may_train(stored, node, body)], body, ("min_version",))
        for at in range(len(node.output) if old else 0):
            fates.note((node.seq, at), "stale")
        recent += [] if old else [node]
    names = {node.id for node in recent}
    above: set[str] = set()
    for leaf in leaves(stored, recent):
        path = chain(stored, leaf)
        first = [node for node in path if node.id in names and node.id not in above]
        versions = [each for node in first for each in node.versions[may_train(stored, node, body)]]
        stale = too_stale(versions, body, ("max_version_span",))
        above |= set() if stale else {node.id for node in path}
        for node in first:
            for at in range(len(node.output)):
                fates.note((node.seq, at), "stale" if stale else "trained")
    nodes = [node for node in stored.nodes.values() if node.id in above]
    return [_tree_row(stored, body, nodes, {node.seq for node in recent})] if nodes else []


def _tree_row(stored: Stored, body: Body, nodes: list[Node], kept: set[int]) -> Row:
    own = []
    for node in nodes:
        whole = tokens(stored, node)
        own.append(Tokens(*(getattr(whole, name)[node.prefix_length :] for name in ("ids", "owner", "at"))))
    standing = Tokens(*(np.concatenate([getattr(each, name) for each in own]) for name in ("ids", "owner", "at")))
    row = _columns(stored, standing, nodes, body, kept, set(), np.ones(len(standing.ids), bool))
    ends = np.cumsum([len(each.ids) for each in own])
    rewards, scores = [main_reward(stored, node, body) or 0.0 for node in nodes], Scores(stored, body)
    places = [np.arange(len(each.ids)) + node.prefix_length for node, each in zip(nodes, own, strict=True)]
    names, values = [node.id for node in nodes], returns(stored, body)
    return {
        **row,
        "position_ids": np.concatenate(places),
        "node_offsets": np.array([0, *ends]),
        "node_parents": np.array([names.index(node.parent) if node.aligned and node.parent else -1 for node in nodes]),
        "node_positions": np.array([each[0] for each in places]),
        "node_rewards": np.array(rewards, np.float32),
        "node_returns": np.array([values[name] for name in names], np.float32),
        "rewards": [sum(rewards) if scores.scope == "path" else scores.of(names) or 0.0],
        "raw_rewards": [rewards[-1]],
    }


def _first_output(standing: Tokens) -> int:
    return int(np.flatnonzero(standing.owner >= 0)[0])


def _fits(stored: Stored, leaf: Node, body: Body) -> bool:
    standing = tokens(stored, leaf)
    first = _first_output(standing)
    fits = first <= body["prompt_length"] and len(standing.ids) - first <= body["response_length"]
    return fits or body.get("on_too_long") == "truncate"


@dataclass(frozen=True)
class _Padded:
    """The tokens that are kept: the end of the prompt, which is padded on the left, and a part of the response."""

    prompt: list[int]
    response: list[int]

    @classmethod
    def of(cls, standing: Tokens, body: Body) -> _Padded:
        first, length = _first_output(standing), len(standing.ids)
        left, right = body["prompt_length"], body["response_length"]
        spare = max(length - first - right, 0)
        start = {"head": 0, "middle": spare // 2, "tail": spare}[body.get("keep", "head")]
        return cls(list(range(max(first - left, 0), first)), list(range(first, length))[start : start + right])

    def there(self, length: int) -> np.ndarray:
        return np.isin(np.arange(length), [*self.prompt, *self.response])

    def lay_out(self, row: Row, body: Body) -> Row:
        """Pad the prompt on the left and the response on the right."""
        prompt, response, length = self.prompt, self.response, len(row["input_ids"])
        left, right = body["prompt_length"], body["response_length"]

        def lay(values: Any, fill: Any) -> np.ndarray:
            pads = [fill] * (left - len(prompt)), [fill] * (right - len(response))
            return np.array([*pads[0], *values[prompt], *values[response], *pads[1]])

        real = lay(np.ones(length, int), 0)
        origin = lay(np.arange(length), -1).tolist()
        turns = []
        for turn in row["turns"]:
            span = turn["span"] and [origin.index(turn["span"][0]), origin.index(turn["span"][1] - 1) + 1]
            turns.append({**turn, "span": span})
        out: Row = {name: lay(row[name], fill) for name, fill in _FILLS.items()}
        out["input_ids"] = lay(row["input_ids"], body.get("pad_token_id", 0))
        scores = np.zeros(right)
        scores[len(response) - 1] = row["rewards"][0]
        out |= {
            "prompts": out["input_ids"][:left],
            "responses": out["input_ids"][left:],
            "response_mask": out["loss_mask"][left:],
            "attention_mask": real,
            "position_ids": np.clip(np.cumsum(real) - 1, 0, None),
            "rollout_log_probs": out["logprobs"][left:],
            "rm_scores": scores,
            "__num_turns__": [2 * len(turns)],
            "prompt_lengths": [len(prompt)],
            "response_lengths": [len(response)],
            "turns": turns,
        }
        if "token_rewards" in row:
            out["token_rewards"] = lay(row["token_rewards"], 0.0)
        return {**out, **{name: row[name] for name in ("rewards", "raw_rewards", "interaction_ids", "logprobs_of")}}


_FILLS = {"loss_mask": 0, "logprobs": 0.0, "versions": -1, "turn_ids": -1}


class Groups:
    """Advantages over `sessions`, which are all matches of an export's filter, by the formulas of the papers."""

    def __init__(self, sessions: list[Stored], body: Body) -> None:
        self._body = body
        scored = [Scores(stored, body) for stored in sessions]
        self._scores = [
            ((each.stored.group, agent), value)
            for each in scored
            if not each.left_out
            for agent, value in each.values(each.stored.nodes)
        ]
        self._scopes = {
            (each.stored.group, each.scope) for each in scored if not each.left_out and each.values(each.stored.nodes)
        }
        self._states = [(each.state(name), value) for each in scored for name, value in each.steps().items()]

    def mixed(self, stored: Stored) -> bool:
        """Return whether advantages compare scores of different scopes in the session's group."""
        return "advantages" in self._body and sum(group == stored.group for group, _ in self._scopes) > 1

    def members(self, stored: Stored) -> int:
        """Return how many scores the session's group compares; of several agents those of the one with the fewest."""
        scores = Scores(stored, self._body)
        peers = scores.agents(stored.nodes) if scores.by_agent else {ALL}
        return min((sum(key == (stored.group, peer) for key, _ in self._scores) for peer in peers), default=0)

    def of(self, stored: Stored, row: Row) -> Row:
        """Return the columns `advantages` and `step_advantages` of a sample, if they are requested."""
        out: Row = {}
        if kind := self._body.get("advantages"):
            scores, names = Scores(stored, self._body), row["interaction_ids"]
            joined = self._body.get("layout") in ("concat", "padded")
            values = scores.values(names, names[-1] if joined else None)
            found = [_advantage(self._scores, (stored.group, agent), value, kind) for agent, value in values]
            out["advantages"] = [float(np.mean(found)) if found else 0.0]
        if kind := self._body.get("step_advantages"):
            scores = Scores(stored, self._body)
            steps = scores.steps()
            states = {name: scores.state(name) for name in steps}
            out["step_advantages"] = [
                _advantage(self._states, states[name], steps[name], kind) if name in steps else 0.0
                for name in row["interaction_ids"]
            ]
        return out


def _advantage(values: list[tuple[Any, float]], key: Any, own: float, kind: str) -> float:
    group = np.array([value for other, value in values if other == key])
    if len(group) < 2:
        return 0.0
    if kind == "grpo":
        return float((own - group.mean()) / (group.std(ddof=1) + 1e-6))
    return float(own - (group.sum() - own) / (len(group) - 1))


def entry(stored: Stored, body: Body, groups: Groups) -> Row:
    """Return the fields of a session's entry that describe its interactions and its score."""
    scores = Scores(stored, body)
    complete, statuses = stored.nodes.values(), [node.status for node in stored.every]
    reasons = [node.reason for node in complete]
    return {
        "status": stored.status,
        "finished": stored.finished,
        "complete": not {"failed", "aborted"} & set(statuses),
        **{status: statuses.count(status) for status in ("failed", "aborted", "superseded")},
        "reward_scope": scores.scope,
        "score": None if scores.session is None else pytest.approx(scores.session),
        "left_out": scores.left_out,
        **({"agent_scores": _agent_scores(scores)} if scores.scope == "agent" else {}),
        **({"group_members": groups.members(stored)} if "advantages" in body or "step_advantages" in body else {}),
        "reasons": {reason: reasons.count(reason) for reason in reasons},
        "unaligned": sum(node.parent is not None and not node.aligned for node in complete),
        "rewarded": any(
            node.reward is not None or bool(node.rewards) or node.token_rewards is not None for node in complete
        ),
    }
