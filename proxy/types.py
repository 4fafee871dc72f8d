"""The nouns that every part shares. Token arrays are `array('i')`, logprobs `array('f')`, never lists.

`len(output_ids) == len(logprobs) == sum(count for count, _ in versions)` holds for every complete `Interaction`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Ids = array[int]
    Logprobs = array[float]
else:  # array.array takes no type argument at run time before Python 3.12
    Ids = Logprobs = array
Json = Any
VersionRuns = tuple[tuple[int, int], ...]
"""Weight versions of an output as runs (count of tokens, version), in order; one run unless weights changed inside."""


INSTRUCTIONS = "instructions"
"""The name of a system message that came as `instructions`: it is not carried over to the next response."""


TOKENS = "tokens:"
"""Begins the name of a user message that came as token ids; their digest follows. Its content is for reading only."""


ITEM_REFERENCE = "item_reference"
"""The name of an assistant message that stands for the answer of its `origin`, without repeating it."""


def ids_of(values: Any = ()) -> Ids:
    """An `array('i')` of token ids, each in 0 .. 2**31 - 1. Raises OverflowError or TypeError on anything else."""
    return array("i", values)


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Api(StrEnum):
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GENERATE = "generate"


class FinishReason(StrEnum):
    """Why sampling ended. Wire formats map these to their own words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    STOP_STRING = "stop_string"
    CONTENT_FILTER = "content_filter"
    ABORT = "abort"


class Status(StrEnum):
    BEGUN = "begun"
    COMPLETE = "complete"
    FAILED = "failed"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"


class Reason(StrEnum):
    """Where an interaction stands in the tree, and why."""

    FIRST = "first"
    CONTINUED = "continued"
    RESAMPLED = "resampled"
    BRANCHED = "branched"
    REWRITTEN = "rewritten"
    TOOLS_CHANGED = "tools_changed"
    SYSTEM_CHANGED = "system_changed"
    OPTIONS_CHANGED = "options_changed"
    NEW_ROOT = "new_root"
    TEMPLATE = "template"
    DRIFT = "drift"


class SessionStatus(StrEnum):
    ACTIVE = "active"
    ENDED = "ended"
    EXPIRED = "expired"


class Outcome(StrEnum):
    FINISHED = "Finished"
    FAILED = "Failed"
    NO_DATA = "NoData"
    TIMEOUT = "Timeout"


class Credit(StrEnum):
    """How a reward flows back: along the tree, or along the order of completion."""

    TREE = "tree"
    LINEAR = "linear"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function. `arguments` is JSON text, as sampled or as the client wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, the same for all APIs. `content` is the joined text of its parts.

    `images` are digests. `tool_call_id` is for role `tool`. `name` is the tool's, or `instructions` for a system
    message that came as instructions. `origin` is the interaction that an echoed answer says it is from (by item id,
    signature or encrypted content). Identity is role, content, calls and images, and `tool_call_id` up to renaming.
    """

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None
    name: str | None = None
    images: tuple[str, ...] = ()
    origin: str | None = None

    def to_json(self) -> dict[str, Json]:
        """A dict with only what is set; `from_json` gives the message back. `origin` is for one request only."""
        out: dict[str, Json] = {"role": self.role.value, "content": self.content}
        if self.tool_calls:
            out["tool_calls"] = [[call.id, call.name, call.arguments] for call in self.tool_calls]
        for key in ("tool_call_id", "reasoning", "name"):
            value = getattr(self, key)
            if value is not None:
                out[key] = value
        if self.images:
            out["images"] = list(self.images)
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Message:
        return cls(
            role=Role(data["role"]),
            content=data["content"],
            tool_calls=tuple(ToolCall(*call) for call in data.get("tool_calls", ())),
            tool_call_id=data.get("tool_call_id"),
            reasoning=data.get("reasoning"),
            name=data.get("name"),
            images=tuple(data.get("images", ())),
        )


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema (an object), `strict` as the client sent it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Json] = field(default_factory=dict)
    strict: bool | None = None

    def to_json(self) -> dict[str, Json]:
        out: dict[str, Json] = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        if self.strict is not None:
            out["strict"] = self.strict
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Tool:
        return cls(data["name"], data["description"], data["parameters"], data.get("strict"))


class ToolChoiceMode(StrEnum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name` is set with mode `named` only."""

    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    name: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. None means that neither client nor session said anything.

    temperature 0 is greedy. top_k 0 and -1 mean off. `max_tokens` counts sampled tokens, the end token included.
    `stop` are strings and the proxy's own business: engines never see them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def to_json(self) -> dict[str, Json]:
        """Return `temperature` and every field that differs from its default, as an export's `sampling` shows them."""
        out: dict[str, Json] = {"temperature": self.temperature}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value != spec.default:
                out[spec.name] = _listed(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> SamplingParams:
        values = dict(data)
        if "logit_bias" in values:
            values["logit_bias"] = tuple((int(token), float(bias)) for token, bias in values["logit_bias"])
        if "stop" in values:
            values["stop"] = tuple(values["stop"])
        return cls(**values)


def _listed(values: tuple[Json, ...]) -> list[Json]:
    return [list(value) if isinstance(value, tuple) else value for value in values]


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The answer must be JSON: any object, or (with `schema`) a value of that schema."""

    schema: Mapping[str, Json] | None = None


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A parsed request of any API: what to continue, how to sample, and how to answer.

    `template_options` change the head of the prompt (chat_template_kwargs, reasoning effort) and belong to the root's
    identity. `given` names the sampling fields that the client set itself. `dropped` names what the client sent and
    this server left aside. `previous_id` is `previous_response_id`: `messages` are then only those after it. `echo` are
    fields that the reply repeats as they came. `retry`: the client says that it made this request before. `input_ids`:
    the prompt itself, instead of messages; `stop_token_ids` end its output instead of the model's own end tokens.
    """

    api: Api
    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    sampling: SamplingParams = SamplingParams()
    given: frozenset[str] = frozenset()
    template_options: Mapping[str, Json] = field(default_factory=dict)
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    n: int = 1
    dropped: tuple[str, ...] = ()
    previous_id: str | None = None
    response_format: ResponseFormat | None = None
    echo: Mapping[str, Json] = field(default_factory=dict)
    retry: bool = False
    idempotency_key: str | None = None
    state_hash: str | None = None
    purpose: str | None = None
    agent: str | None = None
    input_ids: Ids | None = None
    stop_token_ids: tuple[int, ...] | None = None


@dataclass(slots=True)
class Interaction:
    """One node of a session's tree: what one call added, exactly as sent to and sampled by the engine.

    `prompt_suffix` are the prompt ids after the parent's prompt and output when `aligned`, else the whole prompt
    (`prefix_length` is then 0). `new_messages` are those since the parent's answer (a root: all). `tools` and
    `template_options` are stored where the node is a root, else they are the parent's. `reward` is raw, as it was set.
    `seq` is the order of completion within the session, from 0, given by the commit. Times are Unix seconds.

    `dropped`: request fields that were ignored. `idempotency_key`: the client's header. `grammar`: the output was
    sampled under a grammar. `has_logprobs` False: the output came as text or without logprobs, `logprobs` are zeros,
    and the interaction is never trained. `malformed_calls`: tool calls that could not be parsed and were left as text.
    """

    id: str
    session_id: str
    parent_id: str | None
    aligned: bool
    reason: Reason
    api: Api
    status: Status
    new_messages: tuple[Message, ...]
    output: Message
    prefix_length: int
    prompt_suffix: Ids
    output_ids: Ids
    logprobs: Logprobs
    versions: VersionRuns
    finish_reason: FinishReason | None
    sampling: SamplingParams
    tools: tuple[Tool, ...] = ()
    template_options: Mapping[str, Json] = field(default_factory=dict)
    seq: int = -1
    model: str = ""
    stop_string: str | None = None
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    token_rewards: Logprobs | None = None
    state_hash: str | None = None
    purpose: str | None = None
    agent: str | None = None
    trainable: bool = True
    spans: tuple[tuple[int, int], ...] = ()
    request_hash: str = ""
    error: str | None = None
    dropped: tuple[str, ...] = ()
    idempotency_key: str | None = None
    grammar: bool = False
    has_logprobs: bool = True
    malformed_calls: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int = 0
    created_at: float = 0.0
    first_token_at: float | None = None
    completed_at: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens, the shared prefix included."""
        return self.prefix_length + len(self.prompt_suffix)


@dataclass(slots=True)
class SessionRecord:
    """What is stored of a session apart from its interactions. Keys are SHA-256 hex digests. Times are Unix seconds.

    `limits`: max_turns, max_tokens_per_turn, max_context_tokens, max_total_tokens, deadline_s, on_context_overflow.
    Its keys are no good from `keys_expire_at` on (None: they never expire). `took_capacity`: it holds one of the
    granted starts, which goes back when it fails.
    """

    session_id: str
    task_id: str = ""
    group_id: str | None = None
    status: SessionStatus = SessionStatus.ACTIVE
    api_key_hash: str | None = None
    control_key_hash: str | None = None
    path_key_hash: str | None = None
    sampling: Mapping[str, Json] = field(default_factory=dict)
    limits: Mapping[str, Json] = field(default_factory=dict)
    metadata: Mapping[str, Json] = field(default_factory=dict)
    discount: float = 1.0
    credit: Credit = Credit.TREE
    outcome: Outcome | None = None
    exit_reason: str | None = None
    finished: bool | None = None
    metrics: Mapping[str, Json] = field(default_factory=dict)
    weight_version: int | None = None
    created_at: float = 0.0
    updated_at: float = 0.0
    ended_at: float | None = None
    keys_expire_at: float | None = None
    took_capacity: bool = False
