"""Converts interactions and session records to rows and back, with every field of both types.

A test compares the columns with the fields.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from sqlalchemy import RowMapping

from proxy.store.notes import note_fields, notes_of, step_fields
from proxy.store.sql import checksums, codec
from proxy.types import (
    Api,
    Interaction,
    Logprobs,
    Message,
    PlacedImage,
    Role,
    SamplingParams,
    SessionRecord,
    Tool,
    ids_of,
)
from tokengrove.errors import InvalidRequest
from tokengrove.options.session import Credit, Outcome, RewardScope, SessionStatus
from tokengrove.options.start import Delivery
from tokengrove.reasons import FinishReason, Reason, Status

RowValues = dict[str, Any]
"""Column values of one row by column name."""
Row = RowMapping | Mapping[str, Any]
"""A row that was read, by column name."""
NO_ANSWER = Message(Role.ASSISTANT)
"""The output of an interaction that was read without messages. A stored output is never NULL."""
_count = itemgetter(0)
_UNREWARDED: RowValues = {"reward": None, "rewards": None, "token_rewards": None}
_SESSION_TEXTS = ("session_id", "task_id", "group_id", "exit_reason", "series")
_SESSION_JSON = ("sampling", "turn_options", "limits", "metadata", "metrics")
_INTERACTION_JSON = (
    *("new_messages", "output", "tools", "template_options", "sampling", "versions", "spans", "notes"),
    "asked",
    "images",
)
_INTERACTION_TEXTS = ("id", "model", "purpose", "agent", "state_hash", "stop_string")


def session_row(record: SessionRecord) -> RowValues:
    """The `sessions` columns of a record. Raises InvalidRequest for a value that cannot be stored."""
    row: RowValues = {
        "session_id": record.session_id,
        "task_id": record.task_id,
        "group_id": record.group_id,
        "group_size": record.group_size,
        "status": str(record.status),
        "api_key_hash": record.api_key_hash,
        "control_key_hash": record.control_key_hash,
        "path_key_hash": record.path_key_hash,
        "feedback_key_hash": record.feedback_key_hash,
        "sampling": record.sampling,
        "turn_options": record.turn_options,
        "limits": record.limits,
        "metadata": record.metadata,
        "discount": record.discount,
        "credit": str(record.credit),
        "outcome": None if record.outcome is None else str(record.outcome),
        "exit_reason": record.exit_reason,
        "finished": record.finished,
        "metrics": record.metrics,
        "weight_version": record.weight_version,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
        "ended_at": record.ended_at,
        "keys_expire_at": record.keys_expire_at,
        "took_capacity": record.took_capacity,
        "validation": record.validation,
        "series": record.series,
        "reward_scope": None if record.reward_scope is None else str(record.reward_scope),
        "score": record.score,
        "delivery": None if record.delivery is Delivery.QUEUE else str(record.delivery),
        "withdrawn_at": record.withdrawn_at,
    }
    codec.encode_columns(row, _SESSION_JSON)
    codec.check_texts(row, _SESSION_TEXTS)
    return row


def session_of(row: Row) -> SessionRecord:
    """The record of a `sessions` row."""
    return SessionRecord(
        session_id=row["session_id"],
        task_id=row["task_id"],
        group_id=row["group_id"],
        group_size=row["group_size"],
        status=SessionStatus(row["status"]),
        api_key_hash=row["api_key_hash"],
        control_key_hash=row["control_key_hash"],
        path_key_hash=row["path_key_hash"],
        feedback_key_hash=row["feedback_key_hash"],
        sampling=codec.decode_json(row["sampling"], {}),
        turn_options=codec.decode_json(row["turn_options"], {}),
        limits=codec.decode_json(row["limits"], {}),
        metadata=codec.decode_json(row["metadata"], {}),
        discount=row["discount"],
        credit=Credit(row["credit"]),
        outcome=None if row["outcome"] is None else Outcome(row["outcome"]),
        exit_reason=row["exit_reason"],
        finished=None if row["finished"] is None else bool(row["finished"]),
        metrics=codec.decode_json(row["metrics"], {}),
        weight_version=row["weight_version"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        ended_at=row["ended_at"],
        keys_expire_at=row["keys_expire_at"],
        took_capacity=bool(row["took_capacity"]),
        series=row["series"],
        reward_scope=None if row["reward_scope"] is None else RewardScope(row["reward_scope"]),
        score=row["score"],
        delivery=Delivery.QUEUE if row["delivery"] is None else Delivery(row["delivery"]),
        withdrawn_at=row["withdrawn_at"],
    )


def interaction_row(node: Interaction, seq: int) -> RowValues:
    """The `interactions` columns of a node. Raises InvalidRequest for a value that cannot be stored."""
    check_lengths(node)
    row: RowValues = {
        "id": node.id,
        "session_id": node.session_id,
        "seq": seq,
        "parent_id": node.parent_id,
        "aligned": node.aligned,
        "reason": str(node.reason),
        "api": str(node.api),
        "status": str(node.status),
        "model": node.model,
        "purpose": node.purpose,
        "agent": node.agent,
        "state_hash": node.state_hash,
        "request_hash": node.request_hash,
        "new_messages": list(map(Message.to_json, node.new_messages)),
        "output": node.output.to_json(),
        "tools": list(map(Tool.to_json, node.tools)),
        "template_options": node.template_options,
        "sampling": node.sampling.to_json(),
        "prefix_length": node.prefix_length,
        "prompt_tokens": node.prefix_length + len(node.prompt_suffix),
        "output_tokens": len(node.output_ids),
        "prompt_suffix": codec.encode_ids(node.prompt_suffix),
        "output_ids": codec.encode_ids(node.output_ids),
        "logprobs": codec.encode_floats(node.logprobs),
        "versions": node.versions,
        "finish_reason": None if node.finish_reason is None else str(node.finish_reason),
        "stop_string": node.stop_string,
        **_rewards_of(node),
        "trainable": node.trainable,
        "spans": node.spans,
        "error": None if node.error is None else codec.clean_text(node.error),
        "notes": notes_of(node),
        "cached_tokens": node.cached_tokens,
        "reasoning_tokens": node.reasoning_tokens,
        "created_at": node.created_at,
        "first_token_at": node.first_token_at,
        "completed_at": node.completed_at,
        "unmasked_logprobs": None if node.unmasked_logprobs is None else codec.encode_floats(node.unmasked_logprobs),
        "asked": node.asked,
        "images": node.images and [image.to_json() for image in node.images],
    }
    codec.encode_columns(row, _INTERACTION_JSON)
    codec.check_texts(row, _INTERACTION_TEXTS)
    row["checksum"] = checksums.of_turn(row)
    return row


def interaction_of(row: Row) -> Interaction:
    """The interaction of an `interactions` row."""
    return Interaction(
        id=row["id"],
        session_id=row["session_id"],
        parent_id=row["parent_id"],
        aligned=bool(row["aligned"]),
        reason=Reason(row["reason"]),
        api=Api(row["api"]),
        status=Status(row["status"]),
        new_messages=tuple(map(Message.from_json, codec.decode_json(row["new_messages"], ()))),
        output=NO_ANSWER if row["output"] is None else Message.from_json(codec.decode_json(row["output"])),
        prefix_length=row["prefix_length"],
        prompt_suffix=codec.decode_ids(row["prompt_suffix"]),
        output_ids=codec.decode_ids(row["output_ids"]),
        logprobs=codec.decode_floats(row["logprobs"]),
        versions=pairs_of(row["versions"]),
        finish_reason=None if row["finish_reason"] is None else FinishReason(row["finish_reason"]),
        sampling=SamplingParams.from_json(codec.decode_json(row["sampling"], {})),
        tools=tuple(map(Tool.from_json, codec.decode_json(row["tools"], ()))),
        template_options=codec.decode_json(row["template_options"], {}),
        seq=row["seq"],
        model=row["model"],
        stop_string=row["stop_string"],
        reward=row["reward"],
        rewards=codec.decode_json(row["rewards"], {}),
        token_rewards=_floats(row["token_rewards"]),
        state_hash=row["state_hash"],
        purpose=row["purpose"],
        agent=row["agent"],
        trainable=bool(row["trainable"]),
        spans=pairs_of(row["spans"]),
        request_hash=row["request_hash"],
        error=row["error"],
        **note_fields(codec.decode_json(row["notes"], {})),
        cached_tokens=row["cached_tokens"],
        reasoning_tokens=row["reasoning_tokens"],
        created_at=row["created_at"],
        first_token_at=row["first_token_at"],
        completed_at=row["completed_at"],
        unmasked_logprobs=_floats(row["unmasked_logprobs"]),
        asked=codec.decode_json(row["asked"], {}),
        images=() if row["images"] is None else tuple(map(PlacedImage.from_json, codec.decode_json(row["images"]))),
    )


def _floats(data: bytes | None) -> Logprobs | None:
    return None if data is None else codec.decode_floats(data)


STEP_COLUMNS = (
    *("id", "session_id", "seq", "parent_id", "aligned", "reason", "api", "status"),
    *("reward", "rewards", "state_hash", "purpose", "agent", "trainable", "created_at", "completed_at"),
    "notes",
)
"""The columns from which scores are computed, besides the messages and tools of roots."""


def step_of(row: Row) -> Interaction:
    """The interaction of a row with only STEP_COLUMNS, `new_messages` and `tools`; it has no tokens."""
    return Interaction(
        id=row["id"],
        session_id=row["session_id"],
        parent_id=row["parent_id"],
        aligned=bool(row["aligned"]),
        reason=Reason(row["reason"]),
        api=Api(row["api"]),
        status=Status(row["status"]),
        new_messages=tuple(map(Message.from_json, codec.decode_json(row["new_messages"], ()))),
        output=NO_ANSWER,
        prefix_length=0,
        prompt_suffix=ids_of(),
        output_ids=ids_of(),
        logprobs=array("f"),
        versions=(),
        finish_reason=None,
        sampling=SamplingParams(),
        tools=tuple(map(Tool.from_json, codec.decode_json(row["tools"], ()))),
        seq=row["seq"],
        reward=row["reward"],
        rewards=codec.decode_json(row["rewards"], {}),
        state_hash=row["state_hash"],
        purpose=row["purpose"],
        agent=row["agent"],
        trainable=bool(row["trainable"]),
        created_at=row["created_at"],
        completed_at=row["completed_at"],
        **step_fields(codec.decode_json(row["notes"], {})),
    )


def _rewards_of(node: Interaction) -> RowValues:
    if node.reward is None and node.token_rewards is None and not node.rewards:  # like every turn that just ended
        return _UNREWARDED
    return reward_columns({"reward": node.reward, "rewards": node.rewards, "token_rewards": node.token_rewards})


def reward_columns(update: Mapping[str, Any]) -> RowValues:
    """The columns of the given fields: `reward`, `rewards`, `token_rewards`, `trainable` or `spans`.

    Raises InvalidRequest for a value that is not finite.
    """
    columns: RowValues = {}
    for name, value in update.items():
        if name == "reward":
            if value is not None:
                codec.check_finite(name, (value,))
            columns[name] = value
        elif name == "rewards":
            if value:
                codec.check_finite(name, value.values())
            columns[name] = codec.encode_json(value)
        elif name == "token_rewards":
            if value is not None:
                codec.check_finite(name, value)
            columns[name] = None if value is None else codec.encode_floats(value)
        elif name == "trainable":
            columns[name] = value
        elif name == "spans":
            columns[name] = codec.encode_json(value)
        else:
            raise InvalidRequest(f"{name} is not a reward column", param=name)
    return columns


def check_lengths(node: Interaction) -> None:
    """Raise InvalidRequest unless a complete node has as many logprobs and versions as output ids.

    Failed nodes are stored unchecked: a wrong count may be the reason for the failure.
    """
    length = len(node.output_ids)
    versions = sum(map(_count, node.versions))
    if node.status is not Status.COMPLETE:
        return
    if not length == len(node.logprobs) == versions:
        raise InvalidRequest(
            f"interaction {node.id} has {length} output ids, {len(node.logprobs)} logprobs and {versions} versions"
        )
    if node.unmasked_logprobs is not None and len(node.unmasked_logprobs) != length:
        raise InvalidRequest(
            f"interaction {node.id} has {length} output ids and {len(node.unmasked_logprobs)} unmasked logprobs"
        )


def pairs_of(data: bytes | None) -> tuple[tuple[int, int], ...]:
    """Decode pairs of integers from a JSON column; empty for NULL."""
    return tuple((first, second) for first, second in codec.decode_json(data, ()))
