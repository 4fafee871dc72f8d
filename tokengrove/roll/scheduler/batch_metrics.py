"""Metrics of a batch: scores, lengths, and the metrics of its episodes, reduced as in ROLL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokengrove.errors import InvalidRequest
from tokengrove.roll.values import DataProto

_REDUCERS: dict[str, Callable[[Any], Any]] = {
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "p50": partial(np.percentile, q=50),
    "p99": partial(np.percentile, q=99),
    "std": np.std,
    "sum": np.sum,
}


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any]) -> None:
    """Append each value of `new_data` to the list with the same name in `data`."""
    for name, value in new_data.items():
        data.setdefault(name, []).append(value)


def reduce_metrics(metrics: Mapping[str, Any], reduce_func: Callable[[Any], Any] = np.mean) -> dict[str, Any]:
    """Reduce each list to one number. Other values and empty lists are returned unchanged.

    The end of a name selects the reduction: `@sum` or `_sum`, and likewise mean, max, min, p50, p99 and std.
    `reduce_func` reduces lists with other names. Raises InvalidRequest for an unknown word after `@`.
    """
    return {name: _reduced(name, value, reduce_func) for name, value in metrics.items()}


def get_episode_scores(batch: DataProto) -> NDArray[np.float32]:
    """The score of each episode [episodes], in the order of their first rows in the batch.

    Rows with the same `traj_id` belong to the same episode.
    """
    names, scores = batch.non_tensor_batch["traj_id"], batch.non_tensor_batch["episode_scores"]
    first: dict[str, float] = {}
    for name, score in zip(names, scores, strict=True):
        first.setdefault(name, float(score))
    return np.array(list(first.values()), dtype=np.float32)


def score_metrics(scores: NDArray[Any]) -> dict[str, float]:
    """`score/mean`, `score/max` and `score/min`."""
    return {f"score/{name}": float(_REDUCERS[name](scores)) for name in ("mean", "max", "min")}


def train_metrics(batch: DataProto) -> dict[str, float]:
    """Scores of all episodes and of each tag, and the lengths of the rows in tokens. Names begin with `rollout/`."""
    metrics = score_metrics(get_episode_scores(batch))
    for tag, rows in _rows_by(batch, "tags"):
        metrics |= _under(tag, score_metrics(get_episode_scores(rows)))
    for name, lengths in _lengths(batch):
        metrics |= {f"{name}/{how}": float(_REDUCERS[how](lengths)) for how in ("mean", "max", "min")}
    return _under("rollout", metrics)


def val_metrics(batch: DataProto) -> dict[str, float]:
    """Scores of all episodes, and the reduced metrics of the episodes. Names begin with `val/`.

    As in ROLL, the scores of a tag are computed from the mean scores of its groups.
    """
    metrics = score_metrics(get_episode_scores(batch))
    for tag, rows in _rows_by(batch, "tags"):
        means = [get_episode_scores(group).mean() for _, group in _rows_by(rows, "traj_group_id")]
        metrics |= _under(tag, score_metrics(np.array(means, dtype=np.float32)))
    return _under("val", {**reduce_metrics(batch.meta_info.get("metrics", {})), **metrics})


def _reduced(name: str, value: Any, reduce_func: Callable[[Any], Any]) -> Any:
    if not isinstance(value, list | tuple | np.ndarray) or len(value) == 0:
        return value
    return float(_reducer(name, reduce_func)(value))


def _reducer(name: str, reduce_func: Callable[[Any], Any]) -> Callable[[Any], Any]:
    _, at, word = name.rpartition("@")
    if at:
        if word.strip() not in _REDUCERS:
            raise InvalidRequest(f"metric {name!r}: {word!r} is none of {', '.join(_REDUCERS)}")
        return _REDUCERS[word.strip()]
    return next((how for word, how in _REDUCERS.items() if name.endswith(f"_{word}")), reduce_func)


def _rows_by(batch: DataProto, column: str) -> Iterator[tuple[str, DataProto]]:
    """The rows of each value of a column, in the order in which the values first appear. Tensors are left out."""
    rows = defaultdict(list)
    for index, value in enumerate(batch.non_tensor_batch[column]):
        rows[value].append(index)
    for value, indexes in rows.items():
        taken = {name: np.asarray(values, dtype=object)[indexes] for name, values in batch.non_tensor_batch.items()}
        yield str(value), DataProto(None, taken, {})


def _lengths(batch: DataProto) -> Iterable[tuple[str, NDArray[Any]]]:
    """The lengths of each row in tokens: its trained tokens, its prompt (up to the first sampled token), and others."""
    prompt, response, attention = (
        np.asarray(batch.batch[name]).astype(bool) for name in ("prompt_mask", "response_mask", "attention_mask")
    )
    yield "response_length", response[:, 1:].sum(-1)
    yield "prompt_length", prompt.sum(-1)
    yield "non_prompt_length", (~prompt & attention).sum(-1)


def _under(prefix: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
