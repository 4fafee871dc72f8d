"""Values that several adapters derive from samples.

The prompt of a sample ends before the first sampled token, trained or not, so all samples of a group share a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypedDict

import numpy as np
import orjson
from numpy.typing import NDArray

from tokengrove.client.token_streams import Align
from tokengrove.client.values import Float32, Json, Sample
from tokengrove.errors import InvalidRequest, brief

Sessions = Mapping[str, Mapping[str, Json]]
"""`Export.sessions`: by session id, the entry with the session's metadata and metrics."""


def prompt_length(sample: Sample) -> int:
    """Number of tokens before the first sampled token. Raises InvalidRequest if none was sampled."""
    spans = [turn["span"] for turn in sample.turns if turn.get("span") is not None]
    starts = [int(start) for start, end in spans if end > start]
    trained = np.flatnonzero(sample.loss_mask)
    starts += [int(trained[0])] if len(trained) else []
    if not starts:
        raise InvalidRequest(f"sample {sample.interaction_id!r} has no sampled token; remove it from the samples")
    return min(starts)


def teacher_logprobs(sample: Sample, teacher: str) -> Float32:
    """The logprobs of a teacher of the export, float32 [L]; 0 for tokens that are not trained.

    Raises InvalidRequest if the export has no such teacher, or if a trained token has none, for example of a session
    whose metadata no teacher of this name fits.
    """
    found: Float32 | None = sample.extra.get(f"{teacher}_logprobs")
    if found is None:
        raise InvalidRequest(f"the export has no teacher {teacher!r}: name it in 'teachers'")
    if np.isnan(found[sample.loss_mask > 0]).any():
        raise InvalidRequest(f"the teacher {teacher!r} did not score all trained tokens of {sample.interaction_id!r}")
    return np.nan_to_num(found).astype(np.float32)


def turn_of(sample: Sample) -> Mapping[str, Json]:
    """The turn of a sample that has one turn. Raises InvalidRequest for a sample of several turns."""
    if len(sample.interaction_ids) != 1:
        raise InvalidRequest(f"sample {sample.interaction_id!r} has several turns; export with layout='individual'")
    return sample.turns[0] if sample.turns else {}


def group_of(sample: Sample) -> str:
    """The group of a sample for advantages: its session's group, else its task, else its session.

    With reward scope agent, each agent is a separate group: its samples are compared only with each other.
    """
    return of_agent(sample, sample.group_id or sample.task_id or sample.session_id)


def of_agent(sample: Sample, group: str) -> str:
    """`group`; with a route, its samples within it; with reward scope agent, the sample's agent within that."""
    group = f"{group}@{sample.route}" if sample.route else group
    return f"{group}@{sample.agent or ''}" if sample.reward_scope == "agent" else group


def score_of(sample: Sample) -> float:
    """The score of the sample's session, path or agent, by its reward scope; 0 if nothing was rewarded."""
    return known_score(sample) or 0.0


def known_score(sample: Sample) -> float | None:
    """`score_of`, but None if nothing was rewarded. Raises InvalidRequest for a sample of an older server."""
    if sample.rewarded is None:
        message = f"sample {sample.interaction_id!r} has no score, as an older server exported it; export it again"
        raise InvalidRequest(message)
    return sample.score


def turn_rewards(sample: Sample) -> list[float]:
    """The reward of each turn; 0 for a turn without one."""
    return [float(turn.get("reward") or 0.0) for turn in sample.turns]


def token_columns(samples: Sequence[Sample]) -> dict[str, list[Float32]]:
    """The values per token of each sample, float32 [L], by name.

    `returns`: those of the turns; `token_rewards`: as set, else 0; if any sample has them, `advantages` (of the
    sample), `step_advantages` and `turn_advantages` (of the turns). All except the token rewards are 0 outside the
    trained tokens.
    """
    found = {
        "returns": [sample.returns for sample in samples],
        "token_rewards": [_or_zeros(sample.token_rewards, len(sample.input_ids)) for sample in samples],
    }
    if any(sample.advantage is not None for sample in samples):
        found["advantages"] = [_trained(sample, sample.advantage or 0.0) for sample in samples]
    for name in ("step_advantages", "turn_advantages"):
        if any(name in sample.extra for sample in samples):
            of_turns = [_or_zeros(sample.extra.get(name), len(sample.turns)) for sample in samples]
            found[name] = [sample.per_token(values) for sample, values in zip(samples, of_turns, strict=True)]
    return found


def _trained(sample: Sample, value: float) -> Float32:
    return np.where(sample.loss_mask > 0, np.float32(value), np.float32(0.0))


def _or_zeros(values: Float32 | None, length: int) -> Float32:
    return np.zeros(length, np.float32) if values is None else values


class Annotation(TypedDict):
    """Arguments of `client.annotate`."""

    samples: list[Sample]
    streams: dict[str, list[Any]]
    align: Align


def annotation(
    samples: Sequence[Sample],
    batch: Mapping[str, Any],
    names: Mapping[str, str],
    align: Align,
    ids: tuple[Sequence[Any], Sequence[Any]] | None = None,
) -> Annotation:
    """The columns of a trainer's batch as streams. `names`: the stream of each column of the batch that is known.

    `ids`: those of the samples and those of the rows, which may be in another order, fewer, or repeated, as when a
    trainer fills up a batch; without, the rows are those of the samples, and rows after the last are padding. Raises
    InvalidRequest if the batch has none of the columns, for a row of another sample, and for too few rows.
    """
    columns = {name: batch[column] for column, name in names.items() if batch.get(column) is not None}
    if not columns:
        raise InvalidRequest(f"the batch has none of {', '.join(names)}", param="batch")
    rows = list(range(len(samples)))
    if ids is not None:
        places = dict(zip(ids[0], samples, strict=True))
        found: dict[Any, int] = {}
        for row, each in enumerate(ids[1]):
            found.setdefault(each, row)
        if unknown := [each for each in found if each not in places]:
            raise InvalidRequest(
                f"the batch has a row of {brief(unknown[0])}, which is not among the samples", param="batch"
            )
        samples, rows = [places[each] for each in found], list(found.values())
    for name, column in columns.items():
        if len(column) <= max(rows, default=-1):
            raise InvalidRequest(f"{name!r} has {len(column)} rows, and there are {len(samples)} samples", param=name)
    streams = {name: [column[row] for row in rows] for name, column in columns.items()}
    return {"samples": list(samples), "streams": streams, "align": align}


def weights(samples: Sequence[Sample]) -> Float32:
    """The weight of each sample, float32 [B]."""
    return np.array([sample.weight for sample in samples], np.float32)


def answer_times(sample: Sample) -> list[float]:
    """Seconds from each turn's request to its complete answer, for the turns with both times."""
    return [float(turn["completed_at"] - turn["created_at"]) for turn in sample.turns if is_timed(turn)]


def agent_time(sample: Sample) -> float:
    """Seconds between the answers and the next requests, spent in tools and in the agent itself."""
    turns = [turn for turn in sample.turns if is_timed(turn)]
    gaps = [float(later["created_at"] - turn["completed_at"]) for turn, later in pairwise(turns)]
    return sum(max(gap, 0.0) for gap in gaps)


def is_timed(turn: Mapping[str, Json]) -> bool:
    """Whether a turn has the times of its request and of its complete answer."""
    return turn.get("completed_at") is not None and turn.get("created_at") is not None


def messages_of(sample: Sample) -> list[Json]:
    """The whole conversation, including the last answer; empty unless the export included messages."""
    return [message for turn in sample.turns for message in turn.get("messages") or ()]


def tools_of(sample: Sample) -> list[Json]:
    """The tools of the conversation; empty unless the export included messages."""
    return list(sample.turns[0].get("tools") or ()) if sample.turns else []


def metadata_of(sample: Sample, sessions: Sessions | None) -> Mapping[str, Json]:
    """The metadata of a sample's session."""
    found: Mapping[str, Json] = (sessions or {}).get(sample.session_id, {}).get("metadata") or {}
    return found


def numeric_metrics(sample: Sample, sessions: Sessions | None) -> dict[str, float]:
    """The numeric metrics of a sample's session."""
    found = (sessions or {}).get(sample.session_id, {}).get("metrics") or {}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def as_json(value: Json) -> str:
    """Compact JSON text."""
    return orjson.dumps(value).decode()


def objects(values: Sequence[Any]) -> NDArray[np.object_]:
    """An object array [B], one entry per sample: the form of a DataProto's values that are not tensors."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
