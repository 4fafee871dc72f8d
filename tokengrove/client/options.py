"""Keyword arguments of the client's methods: typed dicts whose fields have the names of the HTTP bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from tokengrove.client.values import Float32, Json, Number

SamplingPolicy = Literal["default", "override"]


class SessionOptions(TypedDict, total=False):
    """Optional fields of `start_session`.

    `group_size`: the number of sessions of the group; claims get them together, once all have ended.
    `key_lifetime_s`: seconds until the session's keys expire. `discount` (0 to 1) and `credit` (`tree` or `linear`):
    how rewards flow back to earlier turns. `reward_scope`: whose rewards score the session, unless an export says
    otherwise; `path` if answers to one prompt that are sampled one after the other are alternatives. `limits`,
    `sampling`: as in `POST /rl/start_session`. `sampling_policy`: with `override` the session's sampling wins over the
    requests'. `tool_parser`: a name of `--tool-parser`. `parallel_tool_calls`: false ends each answer after its first
    call. `chat_template_kwargs`: options of the chat template for all turns, such as `enable_thinking`.
    `grant_capacity`: grant the start that this session takes, in one step (`--capacity-control`).
    `delivery`: `runner` if whoever starts it exports it by its id, and no claim gets it (default: `queue`).
    """

    group_id: str
    group_size: int
    session_id: str
    api_key: str
    key_lifetime_s: float
    metadata: Mapping[str, Json]
    sampling: Mapping[str, Json]
    sampling_policy: SamplingPolicy
    tool_parser: str
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Json]
    limits: Mapping[str, Json]
    discount: float
    credit: str
    reward_scope: Literal["session", "path", "agent"]
    grant_capacity: bool
    delivery: Literal["queue", "runner"]


class WithdrawOptions(TypedDict, total=False):
    """Fields of `withdraw`, with which a live session ends, as in `EndOptions`."""

    outcome: str
    exit_reason: str
    metrics: Mapping[str, Json]
    finished: bool


class GenerateOptions(TypedDict, total=False):
    """How to sample from token ids.

    `sampling_params`: the names of chat completions (`max_tokens`, `temperature`, ...) or SGLang's (`max_new_tokens`,
    ...). `stop_token_ids` and `ignore_eos` are two of them that token loops set for each call. `request_id` keeps calls
    together that share a prefix, where there is no session that does. `timeout_s`: how long to wait for the answer, in
    seconds (default 3600: a call may wait for an update of the weights). `image_data`: the images of the prompt in the
    order of their tokens, as data URLs or base64, or as http URLs if the server fetches them.

    In a session, `agent` marks the turn as that of one of several agents, and `state_hash` names the state that it was
    sampled in, for `step_advantages`. With the `idempotency_key` of an earlier call, whose answer may have been lost,
    it gets that answer: nothing is sampled. All three are visible ASCII characters.

    `traceparent` makes the server's spans a part of the caller's trace, in W3C's form.
    """

    sampling_params: Mapping[str, Json]
    request_id: str
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    timeout_s: float
    image_data: Sequence[str]
    agent: str
    state_hash: str
    idempotency_key: str
    traceparent: str


class ParseOptions(TypedDict, total=False):
    """How to read sampled ids: tool calls are read if there are `tools` (as in a chat completion) or a `tool_parser`.

    `tool_parser`, `reasoning_parser`: the names of `--tool-parser` and `--reasoning-parser`; default: the model's.
    `prompt_ids`: the end of the prompt, if it may have opened the reasoning; default: as the template's does.
    """

    tools: Sequence[Mapping[str, Json]]
    tool_parser: str
    reasoning_parser: str
    prompt_ids: Sequence[int]


KeyKind = Literal["agent", "control", "path"]
PauseMode = Literal["abort", "drain", "retract", "in_place"]
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
TransferStep = Literal[
    "init_weights_update_group",
    "destroy_weights_update_group",
    "begin_weight_update",
    "update_weights_from_tensor",
    "update_weights_from_distributed",
    "end_weight_update",
]
"""A step of SGLang's weight transfers."""
Align = Literal["strict", "first", "last"]
Order = Literal["oldest", "newest"]
ListingPart = Literal["summary", "returns", "counts"]
"""What a listing may include: sums of each session's turns, the returns of its turns, counts of all by status."""


class RewardOptions(TypedDict, total=False):
    """Which reward to set, if not that of the last complete turn of the main agent.

    `interaction_id`, or `turn`: the interaction, by id or by its index in the order of completion, from 0.
    `agent`: the last turn that was marked with this agent, or with `step_scores` all of its turns.
    `name`: name of the reward; rewards of different names are kept side by side.
    `rewards`: one reward per interaction id.
    `step_scores`: one score per complete interaction, in order of completion; with `align` first or last, one per
    interaction of the first or the last ones.
    `token_rewards`: one reward per sampled token of `interaction_id` or `turn`.
    """

    interaction_id: str
    turn: int
    agent: str
    name: str
    rewards: Mapping[str, Number]
    step_scores: Sequence[float] | Float32
    align: Align
    token_rewards: Sequence[float] | Float32


class EndOptions(RewardOptions, total=False):
    """Fields of `end_session`: those that reward turns, and what the environment says of the session.

    `score`: of the whole episode, in place of the sum of its rewards; where no turn has a reward, it is also that of
    the last main turn. `outcome` is Finished, Failed, NoData or Timeout. `finished`: False if the episode was cut off
    (`mask_unfinished`).
    """

    reward: Number
    score: Number
    outcome: str
    exit_reason: str
    metrics: Mapping[str, Json]
    finished: bool


Format = Literal["json", "jsonl", "areal", "npz", "safetensors", "arrow", "parquet"]
Comparison = Literal["grpo", "leave_one_out"]


class Train(TypedDict, total=False):
    """What to train: turns (`all`, `last` or indexes), purposes and agents; the rest stays in the sample as context.

    `constrained`: train what was sampled under a grammar (forced calls, JSON answers) too.
    """

    turns: Literal["all", "last"] | Sequence[int]
    purposes: str | Sequence[str]
    agents: str | Sequence[str]
    exclude: Sequence[str]
    constrained: bool


class SampleOptions(TypedDict, total=False):
    """How samples are built and transferred; fields and defaults are those of `/trajectories/export`.

    Samples are the same in every format. `prompt_length`, `response_length` (tokens), `pad_token_id`, `on_too_long` and
    `keep` apply only to layout padded. `images`: `bytes` fills `Export.images`; by default samples say where images
    stand. `multi_modal_inputs`: what the model's processor made of them, and positions; "auto": if the model sees.
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
    reward_scope: Literal["session", "path", "agent"]
    unrewarded: Literal["skip", "zero"]
    mask_unfinished: bool
    advantages: Comparison
    step_advantages: Comparison
    prompt_length: int
    response_length: int
    pad_token_id: int
    on_too_long: Literal["refuse", "drop", "truncate"]
    keep: Literal["head", "tail", "middle"]
    images: Literal["bytes", "references", "none"]
    multi_modal_inputs: bool | Literal["auto"]


class TokenOptions(TypedDict, total=False):
    """The export of which `include=["tokens"]` tells; fields and defaults are those of an export.

    `filter`: its `purpose`, `agent`, `min_version` and `max_version_span`.
    """

    layout: Literal["individual", "concat", "tree", "padded"]
    drift: Literal["fork", "mask"]
    train: Train
    reward_name: str
    reward_granularity: Literal["pass_rate", "binary"]
    reward_scope: Literal["session", "path", "agent"]
    unrewarded: Literal["skip", "zero"]
    mask_unfinished: bool
    prompt_length: int
    response_length: int
    on_too_long: Literal["refuse", "drop", "truncate"]
    keep: Literal["head", "tail", "middle"]
    filter: SessionFilter


class ExportOptions(SampleOptions, total=False):
    """How to export. `limit`: sessions per page. `wait_s`: how long to wait until the named sessions have ended."""

    wait_s: float
    limit: int


class SessionFilter(TypedDict, total=False):
    """Which sessions to select; `since` (Unix seconds) keeps those that ended then or later, and live ones.

    `metadata` and `metrics` say what each key must be: a value, a list of values, or `{"min": ..., "max": ...}`.
    `rewarded`: only sessions with, or without, a reward. `validation`: what to do with sessions whose metadata has
    `validate: true` (default: skip, but include where sessions are named).

    `purpose` and `agent` select turns; `min_version` and `max_version_span` leave out samples that are too stale to
    train on. These four apply to samples, so a claim takes them only together with `export`.
    """

    group_id: str
    task_id: str
    status: str
    outcome: str
    since: float
    metadata: Mapping[str, Json]
    metrics: Mapping[str, Json]
    rewarded: bool
    validation: Literal["skip", "include", "only"]
    purpose: str | Sequence[str]
    agent: str | Sequence[str]
    min_version: int
    max_version_span: int


class ListingFilter(SessionFilter, total=False):
    """Which sessions to list: what else a listing filters by. It takes none of `agent` and the versions of samples.

    `reward` (the score of the session) and `version` (of the weights, at its start): a number, a list of numbers, or
    `{"min": ..., "max": ...}`. `forked`: with, or without, a turn that went back. `search`: a part of its id, its
    task's or its group's. `purpose`: one that at least one turn has. `session_ids`: at most 1000. `withdrawn`: only
    withdrawn sessions, or none of them (default: both; in groups none).
    """

    session_ids: Sequence[str]
    reward: Number | Sequence[Number] | Mapping[str, Number]
    version: Number | Sequence[Number] | Mapping[str, Number]
    forked: bool
    search: str
    withdrawn: bool


class ClaimOptions(TypedDict, total=False):
    """How to claim: at most `limit` sessions (default 1), leased for `lease_s`, waiting up to `wait_s` for the first.

    With `group_size`, only groups with so many sessions that have all ended are claimed, each whole; without it, that
    of the sessions' start counts.
    `consumer` is the prefix of the claim's id, so that others see who holds a session. Repeating a claim with its
    `claim_id` returns what it holds and renews the lease; with `renew` it claims nothing new, and with `lease_s` 0 it
    gives the sessions back.
    """

    limit: int
    group_size: int
    lease_s: float
    wait_s: float
    consumer: str
    claim_id: str
    renew: bool
    export: SampleOptions


class Delivery(TypedDict, total=False):
    """An answer for `deliver`, and the request that it is for.

    The request is named by `interaction_id`, or by `session_id` and `turn`. One of `message` (a chat message),
    `response` (a chat completion), `text`, `output_ids` (with `logprobs`, natural logarithms, one for each) and `error`
    is the answer. `finish_reason` is stop or length; `version` is the weight version.
    """

    interaction_id: str
    session_id: str
    turn: int
    message: Mapping[str, Json]
    response: Mapping[str, Json]
    text: str
    output_ids: Sequence[int]
    logprobs: Sequence[float] | Float32
    error: str | Mapping[str, Json]
    finish_reason: Literal["stop", "length"]
    version: int
