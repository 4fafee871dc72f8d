"""Keyword arguments of the client's methods, as typed dicts with the field names of the HTTP bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from tokengrove.client.values import Float32, Json, Number


class WithdrawOptions(TypedDict, total=False):
    """Fields of `withdraw`, for the end of a live session, as in `EndOptions`."""

    outcome: str
    exit_reason: str
    metrics: Mapping[str, Json]
    finished: bool


class GenerateOptions(TypedDict, total=False):
    """How to sample from token ids.

    `sampling_params`: parameters with the names of chat completions (`max_tokens`, `temperature`, ...) or of SGLang
    (`max_new_tokens`, ...). `stop_token_ids` and `ignore_eos` are two of them that token loops set for each call.
    `request_id`: outside a session, calls with the same id are routed together, because they share a prefix.
    `timeout_s`: timeout of the answer in seconds (default 3600: a call may wait for a weight update). `image_data`: the
    images of the prompt in the order of their tokens, as data URLs or base64, or as http URLs if the server fetches
    them.

    In a session, `agent` marks the turn as that of one of several agents, and `state_hash` names the state that it was
    sampled in, for `step_advantages`. With the `idempotency_key` of an earlier call whose answer may have been lost,
    the call returns that answer and samples nothing. All three consist of visible ASCII characters.

    `traceparent` makes the server's spans part of the caller's trace, in the W3C format.
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
    """How to parse sampled ids.

    Tool calls are parsed if there are `tools` (as in a chat completion) or a `tool_parser`. `tool_parser`,
    `reasoning_parser`: names as for `--tool-parser` and `--reasoning-parser`; default: the model's. `prompt_ids`: the
    end of the prompt, if it may open the reasoning; default: the end of the template's prompt.
    """

    tools: Sequence[Mapping[str, Json]]
    tool_parser: str
    reasoning_parser: str
    prompt_ids: Sequence[int]


KeyKind = Literal["agent", "control", "path", "feedback"]
PauseMode = Literal["abort", "drain", "retract", "in_place"]
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
TransferStep = Literal[
    "init_weights_update_group",
    "destroy_weights_update_group",
    "begin_weight_update",
    "update_weights_from_tensor",
    "update_weights_from_distributed",
    "end_weight_update",
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
]
"""A step of SGLang's weight transfers, and then of vLLM's."""
Align = Literal["strict", "first", "last"]
ListingPart = Literal["summary", "returns", "counts", "matches"]
"""Optional parts of a listing: a summary per session, the returns of its turns, counts of all sessions by status."""


class RewardOptions(TypedDict, total=False):
    """Which reward to set; by default, the reward of the main agent's last complete turn of a trained route.

    `interaction_id`, or `turn`: the interaction, by id or by its index in the order of completion, from 0.
    `agent`: the last turn that was marked with this agent; with `step_scores`, all of its turns.
    `route`: the last turn of this route; with `step_scores`, all of its turns. Default: the trained ones.
    `name`: name of the reward; rewards with different names coexist.
    `rewards`: one reward per interaction id.
    `step_scores`: one score per complete interaction, in order of completion; with `align` first or last, they may
    cover only the first or the last interactions.
    `token_rewards`: one reward per sampled token of `interaction_id` or `turn`.
    """

    interaction_id: str
    turn: int
    agent: str
    route: str
    name: str
    rewards: Mapping[str, Number]
    step_scores: Sequence[float] | Float32
    align: Align
    token_rewards: Sequence[float] | Float32


class EndOptions(RewardOptions, total=False):
    """Fields of `end_session`: rewards of turns, and the environment's data on the session.

    `score`: the score of the whole episode, which replaces the sum of its rewards. If no turn has a reward, it also
    becomes the reward of the last main turn. `outcome` is Finished, Failed, NoData or Timeout. `finished`: False if the
    episode was cut off (`mask_unfinished`).
    """

    reward: Number
    score: Number
    outcome: str
    exit_reason: str
    metrics: Mapping[str, Json]
    finished: bool


class Delivery(TypedDict, total=False):
    """An answer for `deliver`, and the request that it answers.

    `interaction_id`, or `session_id` and `turn`, name the request. The answer is one of `message` (a chat message),
    `response` (a chat completion), `text`, `output_ids` (with `logprobs`, natural logarithms, one per id) and `error`.
    `finish_reason` is stop or length; `version` is the weight version.
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


# Written by `PYTHONPATH=docker python -m supply.option_tables`: change tokengrove/options.
Format = Literal["json", "jsonl", "areal", "npz", "safetensors", "arrow", "parquet"]


class Limits(TypedDict, total=False):
    """The limits of a session.

    `max_turns`: The most turns.
    `max_total_tokens`: The most sampled tokens of all turns.
    `max_tokens_per_turn`: The most sampled tokens of a turn.
    `max_context_tokens`: The most tokens of a prompt with its answer.
    `on_context_overflow`: What a turn beyond the context gets: a 400, or an empty answer with finish reason `length`.
        Default: error.
    `deadline_s`: How long the session may take turns. In seconds.
    `max_images`: The most different images.
    `max_image_bytes`: The most bytes of its images; equal ones count once.
    """

    max_turns: int
    max_total_tokens: int
    max_tokens_per_turn: int
    max_context_tokens: int
    on_context_overflow: Literal["error", "length"]
    deadline_s: float
    max_images: int
    max_image_bytes: int


class EpisodeOptions(TypedDict, total=False):
    """Where the traffic at an address is cut into sessions.

    `idle_s`: Time without a turn after which an episode ends. In seconds.
    `max_turns`: Turns after which the next one begins another episode.
    `lineage`: Conversations that begin another episode: `new` is every new chat, `compaction` what goes on after one.
    """

    idle_s: float
    max_turns: int
    lineage: str | Sequence[str]


class SessionOptions(TypedDict, total=False):
    """How to start a session.

    `sampling_policy`: Whether requests may choose their own sampling, or the session's holds in any case. Default:
        default.
    `tool_parser`: Format of tool calls, by a name of `--tool-parser`. Default: the server's.
    `parallel_tool_calls`: False ends each answer after its first call. Default: true.
    `chat_template_kwargs`: Options of the chat template for all turns, such as `enable_thinking`.
    `models`: Names or patterns (`*`) that requests give as `model`, and the routes that serve them.
    `replay`: What turns record for training: kept sets, routed experts, alternatives. The agent's replies do not have
        it. Default: the server's.
    `max_kept`: Size of the largest kept set that is recorded, or of the largest complement of one. Default: the
        server's.
    `alternatives`: Alternatives of each sampled token that `top_logprobs` records. Default: the server's.
    `adapter_pinning`: Which LoRA adapter samples its turns: the one that the session began with, or the newest at each
        turn. Default: the server's.
    `episodes`: Cut the traffic at its address and its keys into episodes. Its keys then belong to the next session.
    `session_id`: Id of the session. Default: `task_id` and a number.
    `group_id`: Group of the session, whose members are compared with each other.
    `group_size`: Number of sessions of the group; claims get them together, once all have ended.
    `api_key`: Key of the agent. Default: a new one.
    `key_lifetime_s`: Time until the session's keys expire. In seconds. Default: the server's.
    `metadata`: Any object.
    `sampling`: Sampling of all turns, by the names of chat completions.
    `limits`: Limits of the session.
    `discount`: Discount of rewards that flow back to earlier turns. Default: the server's.
    `credit`: How rewards flow back: to ancestors in the tree, or to all earlier turns. Default: the server's.
    `reward_scope`: Which rewards score the session, unless an export says otherwise; path if answers to one prompt that
        are sampled one after the other are alternatives. Default: by its tree.
    `grant_capacity`: Grant the start that this session takes, in one step (`--capacity-control`).
    `delivery`: Who delivers the session to trainers: the queue of claims, or its runner, who exports it by its id. No
        claim leases a session of a runner, and no group waits for it. Default: queue.
    """

    sampling_policy: Literal["default", "override"]
    tool_parser: str
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Json]
    models: Mapping[str, str]
    replay: str | Sequence[str]
    max_kept: int
    alternatives: int
    adapter_pinning: Literal["session", "follow"]
    episodes: EpisodeOptions
    session_id: str
    group_id: str
    group_size: int
    api_key: str
    key_lifetime_s: float
    metadata: Mapping[str, Json]
    sampling: Mapping[str, Json]
    limits: Limits
    discount: float
    credit: Literal["tree", "linear", "lineage"]
    reward_scope: Literal["session", "path", "agent"]
    grant_capacity: bool
    delivery: Literal["queue", "runner"]


class Teacher(TypedDict, total=False):
    """A model that scores the trained tokens of samples.

    `name`: The beginning of the names of its columns: `teacher_logprobs`. Default: teacher.
    `model`: A name of the table of models; `policy@7` is an adapter version. Default: the server's own engine.
    `top_k`: The number of likeliest tokens at each position. Default: 0.
    `temperature`: The logits are divided by it. Default: 1.
    `metadata`: Only for sessions with this metadata. Of the teachers of one name, the first that fits scores a session.
    """

    name: str
    model: str
    top_k: int
    temperature: float
    metadata: Mapping[str, Json]


class Train(TypedDict, total=False):
    """What to train; the rest stays in the samples as context.

    `turns`: Turns to train: all, the last ones, or indexes from 0 of a conversation. Default: all.
    `purposes`: Train only turns of these purposes.
    `agents`: Train only turns of these agents.
    `exclude`: Do not train the interactions with these ids.
    `constrained`: Also train what was sampled under a grammar: forced tool calls and JSON answers.
    `logprobs`: Turns to train by their `logprobs_of`: any, or only those whose logprobs are by the rule. Default: any.
    `max_segments`: Train only the newest conversations of each lineage, at most this many. Default: all.
    """

    turns: Literal["all", "last"] | Sequence[int]
    purposes: str | Sequence[str]
    agents: str | Sequence[str]
    exclude: str | Sequence[str]
    constrained: bool
    logprobs: Literal["any", "rule"]
    max_segments: int


class SessionFilter(TypedDict, total=False):
    """Which sessions, turns and samples to select. A claim takes `purpose`, `agent` and the versions only together with
    `export`.

    `group_id`: Only sessions of this group.
    `task_id`: Only sessions of this task.
    `status`: Only sessions of this status.
    `outcome`: Only sessions of this outcome.
    `since`: Only sessions that ended at this time or later, and live ones. In Unix seconds.
    `metadata`: Only sessions with this metadata.
    `metrics`: Only sessions with this metric.
    `rewarded`: Only sessions with, or without, a reward.
    `validation`: What to do with sessions whose metadata has `validate: true`. Default: skip, but include where
        sessions are named.
    `purpose`: Only turns of these purposes.
    `agent`: Only turns of these agents.
    `lineage`: Only turns of conversations that came about in these ways.
    `min_version`: Only samples whose trained tokens all have at least this weight version.
    `max_version_span`: Only samples whose trained tokens span at most this many weight versions.
    """

    group_id: str
    task_id: str
    status: Literal["active", "ended", "expired"]
    outcome: Literal["Finished", "Failed", "NoData", "Timeout"]
    since: float
    metadata: Mapping[str, Json]
    metrics: Mapping[str, Json]
    rewarded: bool
    validation: Literal["skip", "include", "only"]
    purpose: str | Sequence[str]
    agent: str | Sequence[str]
    lineage: str | Sequence[str]
    min_version: int
    max_version_span: int


class ListingFilter(TypedDict, total=False):
    """Which sessions to list.

    `group_id`: Only sessions of this group.
    `task_id`: Only sessions of this task.
    `status`: Only sessions of this status.
    `outcome`: Only sessions of this outcome.
    `since`: Only sessions that ended at this time or later, and live ones. In Unix seconds.
    `metadata`: Only sessions with this metadata.
    `metrics`: Only sessions with this metric.
    `rewarded`: Only sessions with, or without, a reward.
    `validation`: What to do with sessions whose metadata has `validate: true`. Default: skip, but include where
        sessions are named.
    `session_ids`: Only these sessions, at most 1000.
    `reward`: Only sessions of this score.
    `turns`: Only sessions with this number of complete turns.
    `forks`: Only sessions with this number of turns that went back.
    `lost`: Only sessions with this number of failed and aborted calls.
    `tokens`: Only sessions with this number of prompt and sampled tokens, over all complete turns.
    `prompt_tokens`: The same, prompt tokens only.
    `output_tokens`: The same, sampled tokens only.
    `duration`: Only sessions of this many seconds from the start to the end, or to the last change.
    `version`: Only sessions that began at this weight version.
    `trained_in`: Only sessions with a turn in this step of a trainer: `TRAINER/STEP`.
    `forked`: Only sessions with, or without, a turn that went back.
    `search`: Only sessions whose id, task or group contains this text, in any case of ASCII letters.
    `text`: Only sessions with a turn that has all these words and "phrases", in any case of letters. Needs `--search`.
    `purpose`: Only sessions with a turn of this purpose.
    `withdrawn`: Only withdrawn sessions, or none of them. Default: both; in counts of groups none.
    """

    group_id: str
    task_id: str
    status: Literal["active", "ended", "expired"]
    outcome: Literal["Finished", "Failed", "NoData", "Timeout"]
    since: float
    metadata: Mapping[str, Json]
    metrics: Mapping[str, Json]
    rewarded: bool
    validation: Literal["skip", "include", "only"]
    session_ids: Sequence[str]
    reward: Number | Sequence[Number] | Mapping[str, Number]
    turns: Number | Sequence[Number] | Mapping[str, Number]
    forks: Number | Sequence[Number] | Mapping[str, Number]
    lost: Number | Sequence[Number] | Mapping[str, Number]
    tokens: Number | Sequence[Number] | Mapping[str, Number]
    prompt_tokens: Number | Sequence[Number] | Mapping[str, Number]
    output_tokens: Number | Sequence[Number] | Mapping[str, Number]
    duration: Number | Sequence[Number] | Mapping[str, Number]
    version: Number | Sequence[Number] | Mapping[str, Number]
    trained_in: str
    forked: bool
    search: str
    text: str
    purpose: Literal["main", "title", "summary", "subagent", "aux"]
    withdrawn: bool


class SampleOptions(TypedDict, total=False):
    """How samples are made and sent.

    `layout`: How a session becomes samples. Default: concat.
    `discount`: Discount of the returns. Default: the session's.
    `credit`: How rewards flow back to earlier turns. Default: the session's.
    `drift`: How to export turns that cannot be joined to their parents: in a new sample, or in the same one, which
        trains only answers that are still there as sampled. Default: fork.
    `train`: What to train; the rest stays as context.
    `include`: Also include the messages or the text of turns.
    `images`: What samples have of images: where they stand, also their bytes (each once a page), or nothing. Default:
        references.
    `multi_modal_inputs`: Also what the model's processor made of images, and the positions of vision models; auto: if
        the model is one.
    `replay`: Recorded columns that samples have: kept sets, routed experts, alternatives. Default: all that were
        recorded; none in json, jsonl and areal.
    `teachers`: Models that score the trained tokens: the logprobs of each are columns of the samples.
    `reward_name`: Name of the reward that counts. Default: the unnamed one.
    `reward_granularity`: As in ROLL: the metric of that name is the reward, else the score.
    `reward_scope`: Which rewards are summed into a sample's reward. Default: that of the session's start, else by its
        score and tree; path with format areal or style.
    `unrewarded`: What happens to sessions that run, failed or have no reward: they are left out, or count with the
        rewards they have, else as 0. Default: skip with advantages, else zero.
    `mask_unfinished`: Train nothing of sessions that ended with `finished: false`.
    `stale`: What to do with tokens older than `filter.min_version`: drop the samples that would train them, or mask
        only these tokens. Default: drop.
    `advantages`: Add a column of advantages within each group.
    `step_advantages`: Add a column of advantages among the turns of a group with the same `state_hash`.
    `turn_advantages`: Add a column with an advantage of each turn: gigpo, from its sample and its state; process, from
        rewards of turns.
    `step_weight`: The weight of the state's advantage in `turn_advantages`: gigpo. Default: 1.
    `prompt_length`: Length of prompts, padded on the left. Layout padded needs it. In tokens.
    `response_length`: Length of responses, padded on the right. Layout padded needs it. In tokens.
    `pad_token_id`: Token id of the padding. Default: 0.
    `on_too_long`: What to do with samples that do not fit, also in layout forest, which cannot truncate them. Default:
        refuse.
    `keep`: Part of a truncated response to keep. Default: head.
    `max_tokens`: Most tokens of a sequence. Several groups are packed into one; a group that does not fit becomes
        several, which repeat context. In tokens. Default: one sequence per group.
    `merge`: Which samples may share tokens. Default: group.
    `experts`: The experts of tokens that samples share. Default: first.
    `format`: Format of the samples. Default: json; for `tokengrove export` as the file is named, or jsonl in a folder.
    """

    layout: Literal["individual", "concat", "tree", "padded", "forest"]
    discount: float
    credit: Literal["tree", "linear", "lineage"]
    drift: Literal["fork", "mask"]
    train: Train
    include: str | Sequence[str]
    images: Literal["bytes", "references", "none"]
    multi_modal_inputs: bool | Literal["auto"]
    replay: str | Sequence[str]
    teachers: Sequence[Teacher]
    reward_name: str
    reward_granularity: Literal["pass_rate", "binary"]
    reward_scope: Literal["session", "path", "agent"]
    unrewarded: Literal["skip", "zero"]
    mask_unfinished: bool
    stale: Literal["drop", "mask"]
    advantages: Literal["grpo", "leave_one_out"]
    step_advantages: Literal["grpo", "leave_one_out"]
    turn_advantages: Literal["gigpo", "process"]
    step_weight: float
    prompt_length: int
    response_length: int
    pad_token_id: int
    on_too_long: Literal["refuse", "drop", "truncate"]
    keep: Literal["head", "tail", "middle"]
    max_tokens: int
    merge: Literal["group", "all"]
    experts: Literal["first", "equal"]
    format: Format


class ExportOptions(SampleOptions, total=False):
    """How to export.

    `route`: Only turns of these routes. Default: the trained ones.
    `wait_s`: Wait until the named sessions have ended. In seconds. Default: 0.
    `limit`: Sessions per page, or per file of a folder. Default: 1000; for `tokengrove export` 100.
    """

    route: str | Sequence[str]
    wait_s: float
    limit: int


class TokenOptions(TypedDict, total=False):
    """The export that `include=["tokens"]` shows a turn in.

    `filter`: Which sessions, turns and samples.
    `route`: Only turns of these routes. Default: the trained ones.
    `layout`: How a session becomes samples. Default: concat.
    `drift`: How to export turns that cannot be joined to their parents: in a new sample, or in the same one, which
        trains only answers that are still there as sampled. Default: fork.
    `train`: What to train; the rest stays as context.
    `reward_name`: Name of the reward that counts. Default: the unnamed one.
    `reward_granularity`: As in ROLL: the metric of that name is the reward, else the score.
    `reward_scope`: Which rewards are summed into a sample's reward. Default: that of the session's start, else by its
        score and tree; path with format areal or style.
    `unrewarded`: What happens to sessions that run, failed or have no reward: they are left out, or count with the
        rewards they have, else as 0. Default: skip with advantages, else zero.
    `mask_unfinished`: Train nothing of sessions that ended with `finished: false`.
    `stale`: What to do with tokens older than `filter.min_version`: drop the samples that would train them, or mask
        only these tokens. Default: drop.
    `prompt_length`: Length of prompts, padded on the left. Layout padded needs it. In tokens.
    `response_length`: Length of responses, padded on the right. Layout padded needs it. In tokens.
    `on_too_long`: What to do with samples that do not fit, also in layout forest, which cannot truncate them. Default:
        refuse.
    `keep`: Part of a truncated response to keep. Default: head.
    `max_tokens`: Most tokens of a sequence. Several groups are packed into one; a group that does not fit becomes
        several, which repeat context. In tokens. Default: one sequence per group.
    """

    filter: SessionFilter
    route: str | Sequence[str]
    layout: Literal["individual", "concat", "tree", "padded", "forest"]
    drift: Literal["fork", "mask"]
    train: Train
    reward_name: str
    reward_granularity: Literal["pass_rate", "binary"]
    reward_scope: Literal["session", "path", "agent"]
    unrewarded: Literal["skip", "zero"]
    mask_unfinished: bool
    stale: Literal["drop", "mask"]
    prompt_length: int
    response_length: int
    on_too_long: Literal["refuse", "drop", "truncate"]
    keep: Literal["head", "tail", "middle"]
    max_tokens: int


class ClaimOptions(TypedDict, total=False):
    """How to claim sessions.

    `limit`: The most sessions to claim. Default: 1.
    `group_size`: Claim only groups of so many sessions that have all ended, each group whole. Default: that of the
        sessions' start.
    `lease_s`: Length of the lease; 0 gives the sessions back. In seconds. Default: 600.
    `wait_s`: How long to wait for a first session. In seconds. Default: 0.
    `consumer`: Prefix of the claim's id, so that others see who holds a session.
    `claim_id`: Id of this claim, to repeat it or to renew its lease. Default: a new id.
    `renew`: Renew the lease of `claim_id` and claim nothing new.
    `route`: Claim the sessions of this trained route, and its samples. Default: the only one.
    `export`: Answer with samples, made with these options of an export.
    """

    limit: int
    group_size: int
    lease_s: float
    wait_s: float
    consumer: str
    claim_id: str
    renew: bool
    route: str
    export: SampleOptions


# The end of what is written.
