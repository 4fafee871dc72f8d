"""The JSON of sessions and interactions in `/rl/...` replies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from proxy.sessions.issued_keys import IssuedKeys
from proxy.store.notes import notes_of
from proxy.trajectory.compared import turn_numbers
from proxy.trajectory.purpose import derive_purposes
from proxy.trajectory.returns import compute_returns
from proxy.trajectory.summary import certificate
from proxy.turns.turn import Turn
from proxy.types import Interaction, SessionRecord
from tokengrove.reasons import Status

_COUNTS = ("reasons", "unaligned", "failed", "aborted", "superseded", "routes")
_OF_ROUTES = ("route", "route_kind")


def started_json(started: IssuedKeys, server_url: str) -> dict[str, Any]:
    """The addresses and keys of a session. A key that is not new is null, because only its hash is stored.

    `root_url` contains the session's path secret, so it works with any API key or none.
    """
    session_id = started.record.session_id
    root_url = f"{server_url}/{quoted(session_id)}"
    if started.path_key is not None:
        root_url = f"{root_url}~{started.path_key}"
    shown = {
        "session_id": session_id,
        "api_key": started.api_key,
        "control_key": started.control_key,
        "base_url": f"{root_url}/v1",
        "root_url": root_url,
        "keys_expire_at": started.record.keys_expire_at,
    }
    if started.feedback_key is not None:
        shown["feedback_key"] = started.feedback_key
    return shown


def addressed(session_id: str) -> dict[str, str]:
    """The header with the id of the addressed session, as in a URL: the caller may know only its key."""
    return {"x-tokengrove-session": quoted(session_id)}


def record_json(record: SessionRecord) -> dict[str, Any]:
    """The fields of a session without its interactions. Times are Unix seconds; `version` is the one at its start."""
    return {
        "session_id": record.session_id,
        "status": record.status.value,
        "task_id": record.task_id,
        "group_id": record.group_id,
        "group_size": record.group_size,
        "outcome": record.outcome.value if record.outcome else None,
        "exit_reason": record.exit_reason,
        "finished": record.finished,
        "metrics": dict(record.metrics),
        "metadata": dict(record.metadata),
        "discount": record.discount,
        "credit": record.credit.value,
        "reward_scope": record.reward_scope,
        "episode_score": record.score,
        "delivery": record.delivery.value,
        "withdrawn": record.withdrawn,
        "version": record.weight_version,
        "created_at": record.created_at,
        "ended_at": record.ended_at,
    }


def session_json(record: SessionRecord, interactions: Sequence[Interaction], begun: int) -> dict[str, Any]:
    """A session with its interactions, given in order of `seq`. `begun`: the number of calls that have not ended."""
    counts = certificate(record, interactions, begun)
    shown = {name: counts[name] for name in _COUNTS if name in counts}
    nodes = interactions_json(record, interactions)
    return {**record_json(record), **shown, "begun_not_ended": begun, "interactions": nodes}


def interactions_json(record: SessionRecord, interactions: Sequence[Interaction]) -> list[dict[str, Any]]:
    """All interactions of a session without their tokens. `turn` numbers the complete ones, from 0."""
    complete = [interaction for interaction in interactions if interaction.status is Status.COMPLETE]
    returns = compute_returns(complete, record.discount, record.credit)
    purposes, turns = derive_purposes(interactions), turn_numbers(interactions)
    return [
        {**_interaction_json(node, returns.get(node.id), purposes.get(node.id)), "turn": turns.get(node.id)}
        for node in interactions
    ]


def _interaction_json(interaction: Interaction, value: float | None, purpose: str | None) -> dict[str, Any]:
    """The fields of an interaction without its tokens. `value`: its return. `purpose`: None for the stored purpose."""
    return {
        "interaction_id": interaction.id,
        "id": interaction.id,  # the older name
        "parent_id": interaction.parent_id,
        "aligned": interaction.aligned,
        "seq": interaction.seq,
        "api": interaction.api.value,
        "model": interaction.model,
        "reason": interaction.reason.value,
        "status": interaction.status.value,
        "purpose": purpose or interaction.purpose,
        "agent": interaction.agent,
        **_route_json(interaction),
        "reward": interaction.reward,
        "rewards": dict(interaction.rewards),
        "return": value,
        "finish_reason": interaction.finish_reason.value if interaction.finish_reason else None,
        "prompt_tokens": interaction.prompt_tokens,
        "output_tokens": len(interaction.output_ids),
        "trainable": interaction.trainable,
        "spans": [list(span) for span in interaction.spans],
        "versions": [list(run) for run in interaction.versions],
        "error": interaction.error,
        "notes": {name: value for name, value in notes_of(interaction).items() if name not in _OF_ROUTES},
    }


def _route_json(interaction: Interaction) -> dict[str, Any]:
    """`route` and `route_kind`; nothing without a table of models."""
    return {"route": interaction.route, "route_kind": interaction.route_kind.value} if interaction.route else {}


def quoted(session_id: str) -> str:
    """A session id, encoded for URLs and headers."""
    return quote(session_id, safe="/~:@+")


def running_json(begun: Mapping[str, float], here: Iterable[Turn]) -> list[dict[str, Any]]:
    """One entry per call, in order of start. Calls of other processes have only their id and start; the rest is null.

    `begun`: ids in the database, with Unix seconds. `here`: turns that run in this process.
    """
    known = {turn.interaction.id: _known(turn) for turn in here}
    unknown = {name: _entry(name, begun_at) for name, begun_at in begun.items() if name not in known}
    return sorted((known | unknown).values(), key=lambda entry: (entry["begun_at"], entry["interaction_id"]))


def _known(turn: Turn) -> dict[str, Any]:
    node = turn.interaction
    counts = {"prompt_tokens": turn.prompt_tokens, "output_tokens": len(node.output_ids)}
    about = {"parent_id": node.parent_id, "api": node.api.value, "purpose": node.purpose, "agent": node.agent}
    return _entry(node.id, node.created_at, here=True, **about, **counts)


def _entry(interaction_id: str, begun_at: float, *, here: bool = False, **more: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("parent_id", "api", "purpose", "agent", "prompt_tokens", "output_tokens"))
    return {"interaction_id": interaction_id, "begun_at": begun_at, "here": here, **empty, **more}
