"""A session as OpenEnv's `TrainingTrace`, for trainers of agents that run their own loop.

The trace has every complete turn, in order of completion, with the token ids of its prompt and its output. The mask is
the loss mask of an export in layout individual: 1 on the tokens to train, 0 on all others. A turn that is not trained
is therefore context. It keeps the logprobs of its output if it has any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokengrove.client.blocking_client import Client
from tokengrove.client.libraries import library
from tokengrove.client.options import ExportOptions, Train
from tokengrove.client.values import Json, Sample
from tokengrove.errors import InvalidRequest


def training_trace(client: Client, session_id: str, train: Train | None = None) -> Any:
    """Return the turns of a session, live or ended, as `openenv.core.harness.TrainingTrace`.

    `train` selects turns, purposes and agents to train, as in an export; all other turns are context. Raises
    SessionNotFound, InvalidRequest if the package openenv is not installed, and ValueError for tokens that OpenEnv
    refuses.
    """
    kind = library("openenv.core.harness").TrainingTrace
    return kind.from_entries(trace_entries(client, session_id, train))


def trace_entries(client: Client, session_id: str, train: Train | None = None) -> list[dict[str, Json]]:
    """Return the turns of a session as OpenEnv's `TraceEntry`s, as a session's `fetch_proxy_trace` does.

    Per turn: `request` and `response` as in a chat completion, `prompt_token_ids` [P], `completion_token_ids` [C],
    `per_token_logps` (natural logarithms) [C], `loss_mask` [P + C], and `metadata` with the interaction's id as
    `node_id`. A turn without logprobs has zeros in their place, and mask 0. Raises InvalidRequest for a turn with
    images: a trace cannot contain them, so a trainer would not see them.
    """
    how: ExportOptions = {"layout": "individual", "include": ["messages"]}
    if train is not None:
        how["train"] = train
    export = client.export(session_id=session_id, **how)
    tree = client.session_tree(session_id, include=["logprobs"])
    known = {turn.id: turn.logprobs for turn in tree.interactions}
    numbers = {turn.id: turn.turn or 0 for turn in tree.interactions}
    samples = sorted(export.samples, key=lambda sample: numbers[sample.interaction_id])
    return [_entry(sample, numbers[sample.interaction_id], known[sample.interaction_id]) for sample in samples]


def _entry(sample: Sample, number: int, logprobs: Sequence[float] | None) -> dict[str, Json]:
    if sample.images:
        raise InvalidRequest(
            f"turn {sample.interaction_id!r} has images, which OpenEnv's TrainingTrace cannot hold; export the session "
            "with multi_modal_inputs=True instead",
            param="session_id",
        )
    turn = sample.turns[0]
    start, end = turn["span"]
    ids = sample.input_ids.tolist()
    # Float32 sums of an engine may be slightly above 0, which OpenEnv refuses.
    logps = [0.0] * (end - start) if logprobs is None else [min(float(value), 0.0) for value in logprobs]
    return {
        **_conversation(turn),
        "prompt_token_ids": ids[:start],
        "completion_token_ids": ids[start:end],
        "per_token_logps": logps,
        "loss_mask": sample.loss_mask.tolist()[:end],
        "metadata": _metadata(sample, turn, number),
    }


def _conversation(turn: Mapping[str, Json]) -> dict[str, Json]:
    *asked, answer = turn["messages"]
    choice = {"message": answer, "finish_reason": turn["finish_reason"]}
    return {
        "request": {"messages": asked, "tools": turn.get("tools") or None},
        "response": {"choices": [choice]},
    }


def _metadata(sample: Sample, turn: Mapping[str, Json], number: int) -> dict[str, Json]:
    return {
        "node_id": sample.interaction_id,
        "parent_id": turn.get("parent_id"),
        "index": number,
        "model": turn.get("model"),
        "purpose": sample.purpose,
        "agent": sample.agent,
        "sampling_params": dict(turn.get("sampling") or {}),
        "session_id": sample.session_id,
    }
