"""The values that the client returns, as frozen dataclasses.

Arrays have the dtypes and shapes of the export, whatever the transfer format. Fields that a newer server adds are kept
in `extra`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tokengrove.client.images import ImageBytes, concatenated
from tokengrove.client.tensors import Array, pad_right, to_tensordict, to_torch

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

Json = Any
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Number = float | np.floating[Any]
MROPE = "mrope_position_ids"


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One training sample of L tokens: rewards float32 [1], mask bool [L], logprobs float32 [L], others int32 [L].

    `loss_mask` is 1 on the tokens to train. Elsewhere `logprobs` (natural logs) are 0, `versions` and `turn_ids` -1.
    `score` is the value that advantages compare: the score of the session or, by `reward_scope`, of the sample's path
    or `agent`; None if nothing was `rewarded`. `agent` is the name that its last turn was marked with. `turns` has one
    entry per interaction, in order; `interaction_id` is the id of the last one. In layout padded, L is the padded
    length and `attention_mask` is False in the padding. `images` has digest, start, length, width, height and, if it
    was set, detail of each image; its tokens are `input_ids[start : start + length]`. `recomputable` is the reason why
    logprobs cannot be recomputed from the ids and the temperature, or None. `logprobs_of` is the distribution that they
    are of: `rule`, `sampled` or `model`. `extra` has every other field: the columns
    `weight` and `advantages` (float32 [1]), which the attributes `weight` and `advantage` read, columns of layouts tree
    and padded as arrays with their own dtypes, and the parts requested with `include`.
    """

    session_id: str
    interaction_id: str
    interaction_ids: tuple[str, ...]
    input_ids: Int32
    loss_mask: Int32
    logprobs: Float32
    versions: Int32
    turn_ids: Int32
    attention_mask: NDArray[np.bool_]
    rewards: Float32
    raw_rewards: Float32
    task_id: str | None = None
    group_id: str | None = None
    purpose: str | None = None
    agent: str | None = None
    finish_reason: str | None = None
    recomputable: str | None = None
    logprobs_of: str = "rule"
    rewarded: bool | None = None
    score: float | None = None
    reward_scope: str | None = None
    sampling: Mapping[str, Json] = field(default_factory=dict)
    turns: tuple[Mapping[str, Json], ...] = ()
    images: tuple[Mapping[str, Json], ...] = ()
    extra: Mapping[str, Json] = field(default_factory=dict)
    image_table: Mapping[str, ImageBytes] = field(default_factory=dict, repr=False)

    @property
    def has_inputs(self) -> bool:
        """Whether the export has `multi_modal_inputs` for the images of this sample; False without images."""
        return all(each["digest"] in self.image_table for each in self.images) and any(
            self.image_table[each["digest"]].inputs for each in self.images
        )

    @property
    def multi_modal_inputs(self) -> dict[str, Array] | None:
        """The processor's output for the images, in order.

        For Qwen's models: `pixel_values` float32 [patches, values of a patch] and `image_grid_thw` int64 [images, 3].
        {} for a sample of a vision model without images; None if the export was made without `multi_modal_inputs`. The
        arrays are concatenated at every access, because an export stores the arrays of each image once.
        """
        if self.has_inputs:
            return concatenated(self.images, self.image_table)
        return {} if not self.images and MROPE in self.extra else None

    @property
    def mrope_position_ids(self) -> NDArray[np.int64] | None:
        """Positions int64 [3, L] (time, height, width); None without `multi_modal_inputs`, or if the model has none."""
        return self.extra.get(MROPE)

    @property
    def reward(self) -> float:
        """`rewards` as a number."""
        return float(self.rewards[0])

    @property
    def weight(self) -> float:
        """Its share of the session: 1 / (samples of the session with trained tokens); 0 if it has no trained token."""
        return float(self.extra["weight"][0]) if "weight" in self.extra else 1.0

    @property
    def advantage(self) -> float | None:
        """The advantage within its group; None if the export was made without `advantages`."""
        return float(self.extra["advantages"][0]) if "advantages" in self.extra else None

    @property
    def step_advantages(self) -> Float32 | None:
        """The advantage of each turn, float32 [turns]; None if the export was made without `step_advantages`."""
        return self.extra.get("step_advantages")

    @property
    def turn_advantages(self) -> Float32 | None:
        """The advantage of each turn, float32 [turns]; None if the export was made without `turn_advantages`."""
        return self.extra.get("turn_advantages")

    @property
    def route(self) -> str | None:
        """The route that sampled it; None from a server without a table of models."""
        return self.extra.get("route")

    @property
    def token_rewards(self) -> Float32 | None:
        """The rewards of single tokens, float32 [L], 0 elsewhere; None if none were set."""
        return self.extra.get("token_rewards")

    @property
    def returns(self) -> Float32:
        """The return of the turn that each trained token belongs to, float32 [L]; 0 on all other tokens."""
        return self.per_token([turn.get("return") or 0.0 for turn in self.turns])

    def per_token(self, of_turns: Sequence[float] | Float32) -> Float32:
        """Spread one value per turn over the trained tokens of the turn: float32 [L], 0 on all other tokens."""
        spread, trained = np.zeros(len(self.loss_mask), np.float32), self.loss_mask > 0
        if len(of_turns):
            spread[trained] = np.asarray(of_turns, np.float32)[self.turn_ids[trained]]
        return spread

    def to_tensor_dict(self) -> dict[str, NDArray[Any]]:
        """Return numpy arrays like AReaL's `to_tensor_dict`: all [1, L], rewards [1]."""
        return batch_of([self], 0)

    def to_torch(self) -> dict[str, torch.Tensor]:
        """`to_tensor_dict` in torch, of the same dtypes."""
        return to_torch(self.to_tensor_dict())

    def to_tensordict(self) -> TensorDict:
        """`to_tensor_dict` as a `tensordict.TensorDict` of batch size 1."""
        return to_tensordict(self.to_tensor_dict())


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Result of `acknowledge`. `lost` maps each session that was not acknowledged to the claim that now holds it."""

    sessions: tuple[str, ...]
    lost: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One interaction of a session. `return_` is computed with the session's own discount and credit.

    `turn`: its number among the complete interactions; None if it failed. `reward`: the main reward; `rewards`: those
    with a name. `notes`: rare fields, for example how a client echoed an answer. `agent`: the agent that the client
    named. `route` and `route_kind`: what answered; None without a table of models.

    None unless `include` requested them: `compared` (the continued turn, or the differences from the nearest turn),
    `reply` (as sent to the client), `times` (Unix seconds), `logprobs` (one per sampled token; also None if the answer
    had none), `answer` (the beginning of its `text`, and the names of its `calls`), `added` (its new `messages`,
    `output` and `sampling`; for a turn without parent also `tools` and `template_options`).
    """

    id: str
    parent_id: str | None
    aligned: bool
    seq: int
    api: str
    reason: str
    status: str
    purpose: str | None
    reward: Number | None
    return_: float | None
    finish_reason: str | None
    prompt_tokens: int
    output_tokens: int
    versions: Json
    turn: int | None = None
    error: str | None = None
    notes: Mapping[str, Json] = field(default_factory=dict)
    compared: Mapping[str, Json] | None = None
    reply: Mapping[str, Json] | None = None
    times: Mapping[str, float | None] | None = None
    logprobs: Sequence[float] | None = None
    model: str | None = None
    agent: str | None = None
    answer: Mapping[str, Json] | None = None
    added: Mapping[str, Json] | None = None
    route: str | None = None
    route_kind: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_step(self) -> bool:
        """Whether it is a step of the policy: complete, and of a trained route. `step_scores` count these."""
        return self.turn is not None and self.route_kind in (None, "policy")


@dataclass(frozen=True, slots=True)
class SessionTree:
    """One session with its interactions in order of completion. `extra` has every other field of the answer."""

    session_id: str
    status: str
    task_id: str | None
    group_id: str | None
    outcome: str | None
    interactions: tuple[TreeNode, ...]
    extra: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generated:
    """The output sampled from token ids: `output_ids`, their `logprobs` and weight `versions`, of equal length.

    `id`: the id of the interaction, if it was sampled in a session. `logprobs` is None only for a mailbox answer
    without logprobs. `logprobs_of` is the distribution that they are of, as in `Sample`. `finish_reason` is `stop`,
    `length`, `abort` or `content_filter`. `cached_tokens`: the number of `prompt_tokens` in the engine's prefix cache.
    """

    id: str
    output_ids: list[int]
    logprobs: list[float] | None
    versions: list[int]
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    logprobs_of: str = "rule"
    extra: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The logprobs of given tokens under a model: of one sequence from position `start` on.

    `top_logprobs`: for each token, pairs of (token id, logprob) of the likeliest alternatives, highest first; empty if
    not requested. `version`: the weight version that scored them, or that of the adapter. `session_id` and
    `interaction_id` name the recorded turn whose output was scored; None for given ids.
    """

    start: int
    logprobs: list[float]
    version: int
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    session_id: str | None = None
    interaction_id: str | None = None
    cached_tokens: int = 0
    extra: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineState:
    """The state of the engine. `paused`: the mode of the pause, or None. `released`: the memory that is released.

    `revision`: the commit of a model from the Hugging Face hub; None for a folder. `version`: the weight version.
    `in_flight` and `waiting` count requests. `context_length`: the maximum of prompt plus output tokens. `extra` has
    every other field of the answer.
    """

    engine: str
    model: str
    revision: str | None
    version: int
    paused: str | None
    in_flight: int
    waiting: int
    released: tuple[str, ...]
    capabilities: tuple[str, ...]
    context_length: int
    detail: str
    extra: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineServer:
    """One server of the pool. `state`: `alive`, `failing`, `ejected`, `leaving` or `missing`; `failure`: the reason.

    The counts (requests in flight, requests served, sessions routed to it, prompt tokens, and those of them in its
    prefix cache) and the weight version are None until the server was reached.
    """

    url: str
    state: str
    failure: str | None = None
    in_flight: int | None = None
    served: int | None = None
    session_count: int | None = None
    version: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    extra: Mapping[str, Json] = field(default_factory=dict)


def _known(kind: type, values: Mapping[str, Json]) -> dict[str, Json]:
    """The entries of `values` that are fields of the dataclass `kind`; the rest as `extra`, if it has that field."""
    names = {spec.name for spec in fields(kind)}
    known = {name: value for name, value in values.items() if name in names}
    if "extra" in names:
        known["extra"] = {name: value for name, value in values.items() if name not in names}
    return known


# The dtype and padding value of each column of a batch. input_ids are padded with the caller's token.
_COLUMNS: dict[str, tuple[type[np.generic], float]] = {
    "input_ids": (np.int32, 0),
    "loss_mask": (np.int32, 0),
    "logprobs": (np.float32, 0.0),
    "versions": (np.int32, -1),
    "turn_ids": (np.int32, -1),
    "attention_mask": (np.bool_, False),
}


def batch_of(samples: Sequence[Sample], pad_token_id: int) -> dict[str, Array]:
    """All samples, padded on the right to the longest: each of `_COLUMNS` as [B, L], `rewards` float32 [B]."""
    columns: dict[str, tuple[type[np.generic], float]] = {**_COLUMNS, "input_ids": (np.int32, pad_token_id)}
    arrays = {name: pad_right([getattr(s, name) for s in samples], *column) for name, column in columns.items()}
    return {**arrays, "rewards": np.array([s.rewards[0] for s in samples], np.float32)}


_INT32 = ("input_ids", "loss_mask", "versions", "turn_ids", "node_offsets", "node_parents", "node_positions")
_FOREST = ("row_ids", "parent", "tin", "tout", "row_ends")
_INT64 = ("prompts", "responses", "response_mask", "prompt_lengths", "response_lengths")
_FLOAT32 = (
    *(
        "logprobs",
        "rewards",
        "raw_rewards",
        "weight",
        "advantages",
        "step_advantages",
        "turn_advantages",
        "token_rewards",
    ),
    "unmasked_logprobs",
    *("rollout_log_probs", "rm_scores", "node_rewards", "node_returns"),
    *("row_rewards", "row_raw_rewards", "row_weights", "row_advantages"),
)
_DTYPES: dict[str, Any] = {
    **dict.fromkeys((*_INT32, *_FOREST), np.int32),
    **dict.fromkeys(_INT64, np.int64),
    **dict.fromkeys(_FLOAT32, np.float32),
    "attention_mask": np.bool_,
    "__num_turns__": np.int32,
    MROPE: np.int64,
}


def sample_of(entry: Mapping[str, Json], images: Mapping[str, ImageBytes] | None = None) -> Sample:
    """Parse a sample of an export; arrays may be lists. Raises LookupError or ValueError.

    `images`: the table of the export. The sample keeps only its own images, so that a pickled sample has no others.
    """
    arrays = arrays_of(entry)
    sequences: dict[str, Any] = {name: tuple(entry[name]) for name in ("interaction_ids", "turns")}
    placed = entry.get("images") or ()
    sequences["images"] = tuple({key: value for key, value in each.items() if value is not None} for each in placed)
    sequences["image_table"] = own_images(sequences["images"], images or {})
    return Sample(**_known(Sample, {**entry, **arrays, **sequences}))


def arrays_of(entry: Mapping[str, Json]) -> dict[str, NDArray[Any]]:
    """The arrays of a sample or a sequence, with their dtypes and shapes."""
    position_ids = {"position_ids": np.int64 if "prompts" in entry else np.int32}
    dtypes = {name: dtype for name, dtype in (_DTYPES | position_ids).items() if name in entry}
    arrays = {name: np.asarray(entry[name], dtype=dtype) for name, dtype in dtypes.items()}
    if MROPE in arrays:
        arrays[MROPE] = arrays[MROPE].reshape(3, -1)  # flat in npz and safetensors
    return arrays | _side(entry)


def _side(entry: Mapping[str, Json]) -> dict[str, NDArray[Any]]:
    """The side columns of a sample, in the dtype and the shape that its label `replay` says."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, told in entry.get("replay", {}).items():
        dtype, shape = np.dtype(told["dtype"]), told["shape"]
        if name in entry:
            values = np.asarray(entry[name])
            as_bytes = bool(shape) and values.ndim == 1 and values.dtype == np.uint8  # Arrow, or dtype uint8 in npz
            arrays[name] = (values.view(dtype) if as_bytes else values.astype(dtype, copy=False)).reshape(-1, *shape)
        else:
            arrays[f"{name}_ids"] = np.asarray(entry[f"{name}_ids"], dtype)
            arrays[f"{name}_counts"] = np.asarray(entry[f"{name}_counts"], np.int32)
    return arrays


def with_images(sample: Sample, images: Mapping[str, ImageBytes]) -> Sample:
    """The sample with its own images from the export's table."""
    return replace(sample, image_table=own_images(sample.images, images))


def own_images(placed: Sequence[Mapping[str, Json]], table: Mapping[str, ImageBytes]) -> dict[str, ImageBytes]:
    """The images of a sample from the export's table."""
    return {image["digest"]: table[image["digest"]] for image in placed if image["digest"] in table}


def by_id(sessions: Json) -> dict[str, dict[str, Json]]:
    """The entries of an answer's `sessions`, by session id. In exports of version 0.1.0, `sessions` is an object."""
    if isinstance(sessions, Mapping):
        return {name: {"session_id": name, **entry} for name, entry in sessions.items()}
    return {entry["session_id"]: entry for entry in sessions}


def generated_of(answer: Mapping[str, Json]) -> Generated:
    """Parse the answer of `/v1/generate`."""
    return Generated(**_known(Generated, answer))


def scores_of(answer: Mapping[str, Json]) -> list[TokenScores]:
    """Parse the answer of `/v1/logprobs`."""
    rows = [{**row, "top_logprobs": _pairs(row.get("top_logprobs", ()))} for row in answer["data"]]
    return [TokenScores(**_known(TokenScores, row)) for row in rows]


def _pairs(tops: Sequence[Sequence[Sequence[Json]]]) -> list[list[tuple[int, float]]]:
    return [[(int(token), float(value)) for token, value in row] for row in tops]


def engine_of(answer: Mapping[str, Json]) -> EngineState:
    """Parse the answer of `GET /engine`, which most steps of `/engine/...` repeat."""
    lists = {name: tuple(answer[name]) for name in ("released", "capabilities")}
    return EngineState(**_known(EngineState, {**answer, **lists}))


def servers_of(answer: Mapping[str, Json]) -> list[EngineServer]:
    """Parse the answer of `/engine/servers`."""
    return [EngineServer(**_known(EngineServer, server)) for server in answer["servers"]]


def tree_of(answer: Mapping[str, Json]) -> SessionTree:
    """Parse the answer of `GET /rl/sessions/{id}`."""
    nodes = tuple(TreeNode(**_known(TreeNode, {**node, "return_": node["return"]})) for node in answer["interactions"])
    return SessionTree(**_known(SessionTree, {**answer, "interactions": nodes}))
