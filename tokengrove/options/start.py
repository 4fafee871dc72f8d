"""The options of a session, which it gets at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from tokengrove.options.option import option
from tokengrove.options.session import Credit, RewardScope


class SamplingPolicy(StrEnum):
    """Whose sampling a turn has: the request's, with the session's for what it leaves out; or the session's always."""

    DEFAULT = "default"
    OVERRIDE = "override"


class Replay(StrEnum):
    """What the turns of a session record for training, beside tokens and logprobs.

    `kept`: the ids that truncation and grammar left for each sampled token, and its logprob among them. `experts`: the
    experts that each token was routed to, in a mixture-of-experts model. `top_logprobs`: the likeliest alternatives of
    each sampled token.
    """

    KEPT = "kept"
    EXPERTS = "experts"
    TOP_LOGPROBS = "top_logprobs"


class AdapterPinning(StrEnum):
    """Which LoRA adapter samples the turns of a session.

    `session`: the version that its first turn on the route began with. `follow`: the newest version at each turn.
    """

    SESSION = "session"
    FOLLOW = "follow"


class Delivery(StrEnum):
    """Who gives a session to trainers: the queue of claims, or whoever runs it, who exports it by its id."""

    QUEUE = "queue"
    RUNNER = "runner"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a session. They cannot raise those of the server."""

    max_turns: int | None = option(None, "The most turns.", least=1)
    max_total_tokens: int | None = option(None, "The most sampled tokens of all turns.", least=1)
    max_tokens_per_turn: int | None = option(None, "The most sampled tokens of a turn.", least=1)
    max_context_tokens: int | None = option(None, "The most tokens of a prompt with its answer.", least=1)
    on_context_overflow: Literal["error", "length"] | None = option(
        None,
        "What a turn beyond the context gets: a 400, or an empty answer with finish reason `length`.",
        otherwise="error",
    )
    deadline_s: float | None = option(
        None, "How long the session may take turns.", unit="seconds", least=0.0, most=366 * 86_400.0
    )
    max_images: int | None = option(None, "The most different images.", least=1)
    max_image_bytes: int | None = option(None, "The most bytes of its images; equal ones count once.", least=1)


class EpisodeCut(StrEnum):
    """What a conversation may be at which an episode is cut: it goes on after a compaction, or began otherwise."""

    NEW = "new"
    COMPACTION = "compaction"
    HEAD = "head"
    RESET = "reset"


@dataclass(frozen=True, kw_only=True)
class EpisodeOptions:
    """Where the traffic at an address or a key is cut into episodes, each a session of its own."""

    idle_s: float | None = option(
        None, "Time without a turn after which an episode ends.", unit="seconds", least=0.001, most=366 * 86_400.0
    )
    max_turns: int | None = option(None, "Turns after which the next one begins another episode.", least=1)
    lineage: frozenset[EpisodeCut] | None = option(
        None,
        "Conversations that begin another episode: `new` is every new chat, `compaction` what goes on after one.",
    )


@dataclass(frozen=True, kw_only=True)
class TurnOptions:
    """What a session sets for all of its turns, beside `sampling` and `limits`."""

    sampling_policy: SamplingPolicy | None = option(
        None,
        "Whether requests may choose their own sampling, or the session's holds in any case.",
        otherwise="default",
    )
    tool_parser: str | None = option(
        None, "Format of tool calls, by a name of `--tool-parser`.", otherwise="the server's"
    )
    parallel_tool_calls: bool | None = option(None, "False ends each answer after its first call.", otherwise="true")
    chat_template_kwargs: Mapping[str, Any] = option(
        {}, "Options of the chat template for all turns, such as `enable_thinking`."
    )
    models: Mapping[str, str] | None = option(
        None,
        "Names or patterns (`*`) that requests give as `model`, and the routes that serve them.",
        note="[Models and adapters](models.md).",
    )
    replay: frozenset[Replay] | None = option(
        None,
        "What turns record for training: kept sets, routed experts, alternatives. The agent's replies do not have it.",
        otherwise="the server's",
        note="[Replay columns](replay.md).",
    )
    max_kept: int | None = option(
        None,
        "Size of the largest kept set that is recorded, or of the largest complement of one.",
        least=1,
        otherwise="the server's",
    )
    alternatives: int | None = option(
        None,
        "Alternatives of each sampled token that `top_logprobs` records.",
        least=1,
        most=20,
        otherwise="the server's",
    )
    adapter_pinning: AdapterPinning | None = option(
        None,
        "Which LoRA adapter samples its turns: the one that the session began with, or the newest at each turn.",
        otherwise="the server's",
        note="[Adapters](models.md#adapters).",
    )
    episodes: EpisodeOptions | None = option(
        None,
        "Cut the traffic at its address and its keys into episodes. Its keys then belong to the next session.",
        note="[Episodes](online.md#episodes).",
    )


@dataclass(frozen=True, kw_only=True)
class StartOptions(TurnOptions):
    """How a session starts. The server makes `session_id` of `task_id`, unless it is given."""

    task_id: str | None = option(None, "Task of the session.", otherwise="the `session_id`; one of the two is needed")
    session_id: str | None = option(None, "Id of the session.", otherwise="`task_id` and a number")
    group_id: str | None = option(None, "Group of the session, whose members are compared with each other.")
    group_size: int | None = option(
        None,
        "Number of sessions of the group; claims get them together, once all have ended.",
        least=1,
        most=1000,  # a claim leases at most so many sessions
        note="[Claims](#post-trajectoriesclaim).",
    )
    api_key: str | None = option(
        None, "Key of the agent.", otherwise="a new one", note="[Chosen by the caller](#addresses-and-keys)."
    )
    key_lifetime_s: float | None = option(
        None,
        "Time until the session's keys expire.",
        unit="seconds",
        least=1.0,
        most=3653 * 86_400.0,
        otherwise="the server's",
    )
    metadata: Mapping[str, Any] = option(
        {}, "Any object.", note="Some keys [name the training run](monitoring.md#logs) in the log and in traces."
    )
    sampling: Mapping[str, Any] = option({}, "Sampling of all turns, by the names of chat completions.")
    limits: Limits = option(Limits(), "Limits of the session.")
    discount: float | None = option(
        None, "Discount of rewards that flow back to earlier turns.", least=0.0, most=1.0, otherwise="the server's"
    )
    credit: Credit | None = option(
        None,
        "How rewards flow back: to ancestors in the tree, or to all earlier turns.",
        otherwise="the server's",
    )
    reward_scope: RewardScope | None = option(
        None,
        "Which rewards score the session, unless an export says otherwise; path if answers to one prompt that are "
        "sampled one after the other are alternatives.",
        otherwise="by its tree",
        note="[The score of a session](concepts.md#the-score-of-a-session).",
    )
    grant_capacity: bool | None = option(
        None,
        "Grant the start that this session takes, in one step (`--capacity-control`).",
        note="[Grant](#post-rlgrant_capacity-grant_capacity).",
    )
    delivery: Delivery | None = option(
        None,
        "Who delivers the session to trainers: the queue of claims, or its runner, who exports it by its id. No claim "
        "leases a session of a runner, and no group waits for it.",
        otherwise="queue",
        note="[Claims](#post-trajectoriesclaim).",
    )
