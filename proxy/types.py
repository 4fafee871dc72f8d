"""Types that all packages share. Token ids are `array('i')` and logprobs `array('f')`, never lists.

For every complete `Interaction`: `len(output_ids) == len(logprobs) == sum(count for count, _ in versions)`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from proxy.resources.senders import Sender
from proxy.telemetry.timeline import Timeline
from tokengrove.options.session import Credit, Outcome, RewardScope, SessionStatus
from tokengrove.options.start import Delivery
from tokengrove.reasons import Echo, FinishReason, Reason, Status

if TYPE_CHECKING:
    Ids = array[int]
    Logprobs = array[float]
else:  # array.array takes no type argument at run time before Python 3.12
    Ids = Logprobs = array
Json = Any
VersionRuns = tuple[tuple[int, int], ...]
"""Weight versions of an output as runs (token count, version), in order. Several runs: weights changed midway."""


VALIDATE = "validate"
"""The key of a session's metadata that is true in a validation session."""


INSTRUCTIONS = "instructions"
"""`Message.name` of a system message from the field `instructions`, which the next response does not inherit."""


TOKENS = "tokens:"
"""Prefix of `Message.name` for a user message sent as token ids; their digest follows. Its text is informational."""


ITEM_REFERENCE = "item_reference"
"""`Message.name` of an assistant message that refers to the answer of its `origin` instead of repeating it."""


def ids_of(values: Any = ()) -> Ids:
    """Return token ids as `array('i')` (32-bit signed). Raises OverflowError or TypeError for other values."""
    return array("i", values)


class Role(StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Api(StrEnum):
    """The API that a request came through."""

    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GENERATE = "generate"
    COMPLETIONS = "completions"


class ToolCall(NamedTuple):
    """A tool call. `arguments` is JSON text, exactly as sampled or as the client sent it."""

    id: str
    name: str
    arguments: str


class ImagePart(NamedTuple):
    """An image in a message. Its bytes are found by `digest`, the SHA-256 of them as they came, in hex.

    `at`: how many characters of the message's `content` stand before it. `width`, `height`: in pixels,
    as it is decoded. `detail`: `low` or `high`, as the client asked; "": the default of the model's processor (`auto`).
    """

    digest: str
    at: int = 0
    width: int = 0
    height: int = 0
    detail: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return the fields, without a `detail` that is not set."""
        out: dict[str, Json] = {"digest": self.digest, "at": self.at, "width": self.width, "height": self.height}
        return {**out, "detail": self.detail} if self.detail else out

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> ImagePart:
        return cls(**{name: value for name, value in data.items() if name in cls._fields})


class ImageFile(NamedTuple):
    """An image as a client sent it: it is never encoded anew. `digest`: SHA-256 of `data`, in hex.

    `width`, `height`: in pixels, as it is decoded. `media_type`: `image/png`, `image/jpeg`, `image/webp` or
    `image/gif`, as the bytes say, whatever the client said. `pixels`: a digest of the decoded pixels, equal for the
    same picture encoded anew without loss; "" if not known. `url`: where the server fetched it; None: the client sent
    the bytes.
    """

    digest: str
    media_type: str
    width: int
    height: int
    data: bytes
    pixels: str = ""
    url: str | None = None

    def __repr__(self) -> str:
        """Without the bytes, nor the URL, which may hold a signature: a repr may end up in a log."""
        return f"ImageFile({self.digest}, {self.media_type}, {self.width}x{self.height}, {len(self.data)} bytes)"


class PlacedImage(NamedTuple):
    """The tokens that stand for an image in a prompt: those from `start` on, `length` of them, both counted in the
    whole prompt. The other fields are those of its `ImagePart`.
    """

    digest: str
    start: int
    length: int
    width: int = 0
    height: int = 0
    detail: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return the fields, without a `detail` that is not set."""
        out: dict[str, Json] = {"digest": self.digest, "start": self.start, "length": self.length}
        out |= {"width": self.width, "height": self.height}
        return {**out, "detail": self.detail} if self.detail else out

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> PlacedImage:
        return cls(**{name: value for name, value in data.items() if name in cls._fields})


class Message(NamedTuple):
    """One message of a conversation, the same for all APIs. `content` is the text of its parts, joined.

    `images`: in their order in `content`. `tool_call_id`: for role `tool`. `name`: of the tool, or one of the names
    above. `origin`: the id of the interaction that produced an echoed answer, as its item id, signature or encrypted
    content says. Two messages are equal in a conversation if role, content, calls and images are, and `tool_call_id`
    up to renaming. A tuple, because each request brings all messages of its conversation again: they are compared
    without Python code.
    """

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None
    name: str | None = None
    images: tuple[ImagePart, ...] = ()
    origin: str | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the fields that are set, for `from_json`. `origin` is left out: it belongs to one request."""
        out: dict[str, Json] = {"role": str(self.role), "content": self.content}
        if self.tool_calls:
            out["tool_calls"] = [[call.id, call.name, call.arguments] for call in self.tool_calls]
        for key in ("tool_call_id", "reasoning", "name"):
            value = getattr(self, key)
            if value is not None:
                out[key] = value
        if self.images:
            out["images"] = [image.to_json() for image in self.images]
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
            images=tuple([ImagePart.from_json(image) for image in data.get("images", ())]),
        )


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema of type object; `strict` is as sent."""

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
    """Whether the model may, may not or must call tools, or must call the tool that `ToolChoice` names."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name` is set with mode `named` only."""

    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    name: str | None = None


class SamplingParams(NamedTuple):
    """Sampling parameters. None: set neither by the request nor by the session.

    `temperature` 0 is greedy. `top_k` 0 and -1 mean off. `max_tokens` counts sampled tokens, including the end token.
    `stop`: stop strings, which the proxy detects itself; engines never see them. `stop_token_ids` end the output too:
    over `/v1/generate` instead of the model's end tokens, elsewhere beside them. Neither these nor stop strings end it
    before `min_tokens` are sampled. `include_stop_str_in_output`: the text ends with the stop string, which is always
    among the tokens. A tuple, because every turn makes and hashes one: a frozen dataclass takes three
    times as long to make.
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
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False

    def to_json(self) -> dict[str, Json]:
        """Return `temperature` and every field that differs from its default, as an export's `sampling` shows them."""
        out: dict[str, Json] = {"temperature": self.temperature}
        for name, value, default in zip(self._fields, self, _NO_SAMPLING, strict=True):
            if value != default:
                out[name] = _listed(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> SamplingParams:
        values = {name: value for name, value in data.items() if name in cls._fields}  # a newer server may know more
        if "logit_bias" in values:
            values["logit_bias"] = tuple((int(token), float(bias)) for token, bias in values["logit_bias"])
        for name in ("stop", "stop_token_ids"):
            if name in values:
                values[name] = tuple(values[name])
        return cls(**values)


_NO_SAMPLING = SamplingParams()


def _listed(values: tuple[Json, ...]) -> list[Json]:
    return [list(value) if isinstance(value, tuple) else value for value in values]


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The answer must be JSON: any object, or a value of the JSON `schema`."""

    schema: Mapping[str, Json] | None = None


class PromptText(NamedTuple):
    """A prompt that is a text and no chat. `special`: the tokenizer's tokens before a text (BOS) come first."""

    text: str
    special: bool = True


@dataclass(slots=True)
class TurnRequest:
    """A parsed request of any API: the conversation to continue, how to sample, and how to reply.

    `template_options`: arguments of the chat template (chat_template_kwargs, reasoning effort); they are part of a
    root's identity. `given`: sampling fields that the client set. `dropped`: request fields that were ignored.
    `previous_id`: `previous_response_id`; `messages` are then only the new ones. `echo`: fields that the reply repeats
    unchanged. `retry`: the client marked the request as a retry. `input_ids`: the prompt as token ids, instead of
    `messages`; `text`: the prompt as a text, instead of both. `return_token_ids`: the reply has the ids of the
    prompt and of each choice. `per_token`: it has every sampled token, in order, with its logprob if `logprobs` is
    set (`TokensDelta`). `names_ids`: logprobs name a token by its id instead of its text. `prefill`: the beginning
    of the answer, which the client wrote and the model continues; it is not one of `messages`.
    `return_completion_text`: the reply has the text of each choice as it was sampled, markup included. `tool_parser`:
    the name of the format of its tool calls; None: the model's. Headers set some of the fields (`api.client_hints`),
    and then the session does (`turns.defaults`); then the request stays as it is. `timeline`: what it has
    reached. `images`: those whose tokens `input_ids` have, in their order. `files`: the images of the request that are
    not stored with its session yet, by digest. `sender`: who sent it.
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
    request_id: str | None = None
    state_hash: str | None = None
    purpose: str | None = None
    agent: str | None = None
    input_ids: Ids | None = None
    text: PromptText | None = None
    return_token_ids: bool = False
    return_completion_text: bool = False
    per_token: bool = False
    names_ids: bool = False
    prefill: Message | None = None
    tool_parser: str | None = None
    timeline: Timeline = field(default_factory=Timeline, compare=False, repr=False)
    images: tuple[ImagePart, ...] = ()
    files: dict[str, ImageFile] = field(default_factory=dict, compare=False, repr=False)
    sender: Sender = field(default=Sender(), compare=False, repr=False)


class Continued(NamedTuple):
    """The exact ids of the first `messages` messages of a request; the last of them is an answer, sampled as the last
    `output_tokens` of `ids`."""

    messages: int
    ids: Ids
    output_tokens: int


class Parsing(NamedTuple):
    """How to read an output that is no turn.

    Tool calls are read if there are `tools` or a `tool_parser`, else they stay text. The parsers have the names of
    `--tool-parser` and `--reasoning-parser`; None: the model's. `prompt_ids`: the end of the prompt before the output,
    which may have opened reasoning; None: the model's generation prompt.
    """

    tools: tuple[Tool, ...] = ()
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    prompt_ids: Ids | None = None


@dataclass(slots=True)
class Interaction:
    """One node of a session's tree: what one call added, exactly as it was sent to and sampled by the engine.

    `aligned`: the prompt begins with the parent's prompt and output, token for token; `prefix_length` is their length
    and `prompt_suffix` the ids after them. Otherwise `prefix_length` is 0 and `prompt_suffix` the whole prompt.
    `new_messages`: messages after the parent's answer, for a root all. `tools` and `template_options`: stored for a
    root only; other nodes share their root's. `reward`: as set, before discounting. `seq`: order of completion within
    the session, from 0, assigned by the commit. Times are Unix seconds.

    `dropped`: request fields that were ignored. `best_effort`: sampling fields that the engine got but did not promise
    to honour. `echo`: how the client changed answers of ours in its history, which were taken as they were sampled.
    `prefill`: how many characters of the answer's text the client wrote; their tokens are part of the prompt.
    `idempotency_key`, `request_id`: the client's headers. `grammar`: the output was sampled under a grammar.
    `unmasked_logprobs`: those of an output under a grammar before its mask, one per output id, if the engine reports
    them. `has_logprobs` False: the output came as text or without logprobs, `logprobs` are zeros, and the interaction
    is never trained. `asked`: what the request asked of its reply (`turns.reply_options`). `malformed_calls`: tool
    calls that could not be parsed and were left as text. `uncertain`: `versions` has a version that is the last
    believed one, because the engine named one that nobody published, or because the weights changed within a part of
    the output.
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
    best_effort: tuple[str, ...] = ()
    echo: tuple[Echo, ...] = ()
    prefill: int = 0
    idempotency_key: str | None = None
    request_id: str | None = None
    grammar: bool = False
    has_logprobs: bool = True
    unmasked_logprobs: Logprobs | None = None
    asked: Mapping[str, Json] = field(default_factory=dict)
    malformed_calls: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int = 0
    created_at: float = 0.0
    first_token_at: float | None = None
    completed_at: float | None = None
    images: tuple[PlacedImage, ...] = ()
    uncertain: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Length of the whole prompt in tokens, including the prefix shared with the parent."""
        return self.prefix_length + len(self.prompt_suffix)

    @property
    def sampled_output(self) -> Message:
        """The part of `output` that the model wrote: without what the client wrote at its beginning."""
        if not self.prefill:
            return self.output
        return self.output._replace(content=self.output.content[self.prefill :], reasoning=None)


class PauseNote(NamedTuple):
    """That the server `owner` has paused the engine server at `url`, in the form of the database.

    `mode`: a PauseMode. `released`: the kinds of memory that it had released, with commas. `until`: when the note
    counts no more unless it is renewed, in Unix seconds.
    """

    url: str
    owner: str
    mode: str
    released: str
    until: float


@dataclass(slots=True)
class SessionRecord:
    """The stored fields of a session, without its interactions. Times are Unix seconds.

    The `*_key_hash` fields are SHA-256 hex digests. `sampling`: of turns that do not say otherwise; `turn_options`:
    those of `tokengrove.options.start.TurnOptions` that are given, `limits`: of `Limits` there. `keys_expire_at`: when
    its keys expire; None: never. `group_size`: claims get it only together with its group, once that has so many
    sessions and all have ended.
    `took_capacity`: it uses one of the granted starts, which is returned if the session fails.
    `series`: of a session that was opened after the end of another, the id of the first of them (`default`).
    `reward_scope`: by which exports score it unless they ask for another; None: the tree decides. `score`: of the whole
    session, as its end gave it; None: that of its turns' rewards. `delivery`: who gives it to trainers. `withdrawn_at`:
    when it left its group, the queue of claims and the exports that do not name it; None: it is in them. It has ended.
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
    group_size: int | None = None
    series: str | None = None
    turn_options: Mapping[str, Json] = field(default_factory=dict)
    reward_scope: RewardScope | None = None
    score: float | None = None
    delivery: Delivery = Delivery.QUEUE
    withdrawn_at: float | None = None

    @property
    def withdrawn(self) -> bool:
        """Whether nothing counts it any more, although it is there."""
        return self.withdrawn_at is not None

    @property
    def validation(self) -> bool:
        """Whether it measures a policy (`validate: true` in its metadata), so that it is not to be trained on."""
        return self.metadata.get(VALIDATE) is True


class ListedSession(NamedTuple):
    """A session of a listing. While `turns` (of any status) and `revision` are the same, so is all that it holds."""

    record: SessionRecord
    turns: int
    revision: int


class Outline(NamedTuple):
    """The interactions of a session, by seq, without tokens and texts, of which only roots have those of their prompt.

    `prompt_tokens`, `output_tokens`: sums over the complete ones. `versions`: the least and the greatest weight version
    that sampled a token of those; None without tokens.
    """

    steps: list[Interaction]
    prompt_tokens: int
    output_tokens: int
    versions: tuple[int, int] | None


class GroupSummary(NamedTuple):
    """The sessions of a group, counted: `by_status` are numbers of sessions. Times are Unix seconds.

    `number`: the place of its first session in the order of creation. `size`: the sessions that it needs to be claimed.
    """

    group_id: str
    number: int
    size: int | None
    by_status: dict[SessionStatus, int]
    created_at: float
    last_at: float
