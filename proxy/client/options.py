"""Keyword arguments of the client's methods: typed dicts whose fields have the names of the HTTP bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from proxy.client.values import Float32, Json, Number


class SessionOptions(TypedDict, total=False):
    """What `start_session` takes beside the task."""

    group_id: str
    session_id: str
    api_key: str
    metadata: Mapping[str, Json]
    sampling: Mapping[str, Json]
    limits: Mapping[str, Json]
    discount: float
    credit: str


class RewardOptions(TypedDict, total=False):
    """Which reward is set, where it is not the one of the last complete interaction.

    `turn` is the place of an interaction in the order of completion, from 0, in place of `interaction_id`; `name` keeps
    a reward apart from the others of the interaction; `rewards` go by interaction id; `step_scores` has one score a
    complete interaction in order of completion; `token_rewards` one a sampled token of `interaction_id` or `turn`.
    """

    interaction_id: str
    turn: int
    name: str
    rewards: Mapping[str, Number]
    step_scores: Sequence[float] | Float32
    token_rewards: Sequence[float] | Float32


class EndOptions(TypedDict, total=False):
    """What `end_session` takes. `outcome` is Finished, Failed, NoData or Timeout."""

    reward: Number
    step_scores: Sequence[float] | Float32
    outcome: str
    exit_reason: str
    metrics: Mapping[str, Json]
    finished: bool


Format = Literal["json", "jsonl", "areal", "npz", "safetensors", "arrow", "parquet"]
Comparison = Literal["grpo", "leave_one_out"]


class Train(TypedDict, total=False):
    """What is trained: turns (`all`, `last` or indexes), purposes and agents; the rest stays as context."""

    turns: Literal["all", "last"] | Sequence[int]
    purposes: str | Sequence[str]
    agents: str | Sequence[str]
    exclude: Sequence[str]


class SampleOptions(TypedDict, total=False):
    """How samples are made and sent; fields and their defaults are those of `/export_trajectories`.

    Samples are the same in every format. The lengths, in tokens, and what follows them are for layout padded.
    """

    layout: Literal["individual", "concat", "tree", "padded"]
    format: Format
    discount: float
    credit: str
    drift: Literal["fork", "mask"]
    train: Train
    include: str | Sequence[str]
    reward_name: str
    reward_granularity: Literal["pass_rate", "binary"]
    mask_unfinished: bool
    advantages: Comparison
    step_advantages: Comparison
    prompt_length: int
    response_length: int
    pad_token_id: int
    on_too_long: Literal["refuse", "drop", "truncate"]
    keep: Literal["head", "tail", "middle"]


class ExportOptions(SampleOptions, total=False):
    """How to export. `limit` is sessions a page; `wait_s` how long to wait until the named sessions have ended."""

    wait_s: float
    limit: int


class SessionFilter(TypedDict, total=False):
    """Which sessions to take; `since` (Unix seconds) keeps those that ended then or later, and live ones.

    `purpose` and `agent` choose turns, `min_version` and `max_version_span` leave out samples that are too stale to
    train on, so these go with an export.
    """

    group_id: str
    task_id: str
    status: str
    outcome: str
    since: float
    purpose: str | Sequence[str]
    agent: str | Sequence[str]
    min_version: int
    max_version_span: int


class ClaimOptions(TypedDict, total=False):
    """How to claim: at most `limit` sessions (1 unless said), leased for `lease_s`, waiting `wait_s` for the first.

    `consumer` begins the id of the claim, so that others see who holds a session. A claim made again under its own
    `claim_id` gives what it holds and renews the lease, with `renew` nothing else; `lease_s` 0 gives it back.
    """

    limit: int
    lease_s: float
    wait_s: float
    consumer: str
    claim_id: str
    renew: bool
    export: SampleOptions


class ClaimRequest(ClaimOptions, SessionFilter, total=False):
    """Options and filter of a claim together."""


class ExportRequest(ExportOptions, SessionFilter, total=False):
    """Options and filter of an export together."""
