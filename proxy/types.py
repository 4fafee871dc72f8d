"""Types that all packages share. Token ids are `array('i')` and logprobs `array('f')`, never lists.

For every complete `Interaction`: `len(output_ids) == len(logprobs) == sum(count for count, _ in versions)`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from proxy.resources.senders import Sender
from proxy.telemetry.timeline import Timeline
from tokengrove.options.model import RouteKind
from tokengrove.options.session import Credit, Outcome, RewardScope, SessionStatus
from tokengrove.options.start import Delivery
from tokengrove.reasons import Echo, Evidence, FinishReason, LogprobsOf, Reason, Segment, Status

if TYPE_CHECKING:
    Ids = array[int]
    Logprobs = array[float]
else:  # array.array takes no type argument at run time before Python 3.12
    Ids = Logprobs = array
Json = Any
VersionRuns = tuple[tuple[int, int], ...]
"""Weight versions of an output as runs (token count, version), in order. Several runs: the weights changed midway."""


VALIDATE = "validate"
"""The key of a session's metadata that is true in a validation session."""


INSTRUCTIONS = "instructions"
"""`Message.name` of a system message from the field `instructions`, which the next response does not inherit."""


TOKENS = "tokens:"
"""Prefix of `Message.name` for a user message sent as token ids; their digest follows. Its text is informational."""


ITEM_REFERENCE = "item_reference"
"""`Message.name` of an assistant message that refers to the answer of its `origin` instead of repeating it."""


ids_of: Callable[..., Ids] = partial(array, "i")
"""Return token ids as `array('i')` (32-bit signed). Raises OverflowError or TypeError for other values."""


class Role(StrEnum):
    """The author of a message."""

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
    GOOGLE = "google"


class ToolCall(NamedTuple):
    """A tool call. `arguments` is JSON text, exactly as sampled or as the client sent it."""

    id: str
    name: str
    arguments: str


class ImagePart(NamedTuple):
    """An image in a message. `digest`: the SHA-256 of its original bytes, in hex, by which they are found.

    `at`: the number of characters of the message's `content` before it. `width`, `height`: in pixels, as decoded.
    `detail`: `low` or `high`, as the client requested; "": the default of the model's processor (`auto`).
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
    """An image as a client sent it; it is never re-encoded. `digest`: SHA-256 of `data`, in hex.

    `width`, `height`: in pixels, as decoded. `media_type`: `image/png`, `image/jpeg`, `image/webp` or `image/gif`,
    according to the bytes, whatever the client declared. `pixels`: a digest of the decoded pixels, equal for the same
    picture after lossless re-encoding; "" if unknown. `url`: the URL from which the server fetched it; None: the client
    sent the bytes.
    """

    digest: str
    media_type: str
    width: int
    height: int
    data: bytes
    pixels: str = ""
    url: str | None = None

    def __repr__(self) -> str:
        """Leaves out the bytes and the URL, which may contain a signature: a repr may be logged."""
        return f"ImageFile({self.digest}, {self.media_type}, {self.width}x{self.height}, {len(self.data)} bytes)"


class PlacedImage(NamedTuple):
    """The tokens that stand for an image in a prompt: `length` tokens from `start` on, counted in the whole prompt. The
    other fields are those of its `ImagePart`.
    """

    digest: str
    start: int
    length: int
    width: int = 0
    height: int = 0
    detail: str = ""

    @classmethod
    def without_tokens(cls, part: ImagePart) -> PlacedImage:
        """The image of a message that an external model answers."""
        return cls(part.digest, 0, 0, part.width, part.height, part.detail)

    def to_json(self) -> dict[str, Json]:
        """Return the fields, without a `detail` that is not set."""
        out: dict[str, Json] = {"digest": self.digest, "start": self.start, "length": self.length}
        out |= {"width": self.width, "height": self.height}
        return {**out, "detail": self.detail} if self.detail else out

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> PlacedImage:
        return cls(**{name: value for name, value in data.items() if name in cls._fields})


class Message(NamedTuple):
    """One message of a conversation, the same for all APIs. `content`: the joined text of its parts.

    `images`: in their order in `content`. `tool_call_id`: for role `tool`. `name`: the name of the tool, or one of the
    names above. `origin`: the id of the interaction that produced an echoed answer, taken from its item id, signature
    or encrypted content. In a conversation, two messages are equal if role, content, calls and images are equal, and
    `tool_call_id` up to renaming. A tuple, because each request repeats all messages of its conversation: tuples are
    compared without Python code.
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
    """A function that the model may call. `parameters` is a JSON schema of type object; `strict` is as sent.

    `pattern`: a regular expression that the only parameter, a text, must match as a whole in every call. The model
    does not see it, and it is not stored.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Json] = field(default_factory=dict)
    strict: bool | None = None
    pattern: str | None = None

    @property
    def held_schema(self) -> Mapping[str, Json]:
        """The JSON schema that a call under a grammar obeys: an object without properties if the client sent none."""
        if self.pattern is None:
            return self.parameters or {"type": "object", "properties": {}}
        held = {
            name: {**schema, "pattern": f"^(?:{self.pattern})$"}
            for name, schema in self.parameters["properties"].items()
        }
        return {**self.parameters, "properties": held}

    def to_json(self) -> dict[str, Json]:
        out: dict[str, Json] = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        if self.strict is not None:
            out["strict"] = self.strict
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Tool:
        return cls(data["name"], data["description"], data["parameters"], data.get("strict"))


class ToolChoiceMode(StrEnum):
    """Whether the model may, may not or must call tools, or must call the tool named in `ToolChoice`."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name` is set only with mode `named`."""

    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    name: str | None = None


class SamplingParams(NamedTuple):
    """Sampling parameters. None: set neither by the request nor by the session.

    `temperature` 0 is greedy. `top_k` 0 and -1 mean off. `max_tokens` counts sampled tokens, including the end token.
    `stop`: stop strings, which the proxy detects itself; engines never see them. `stop_token_ids`: ids that also end
    the output; in `/v1/generate` they replace the model's end tokens, elsewhere they are additional. Neither these ids
    nor stop strings end it before `min_tokens` tokens are sampled. `include_stop_str_in_output`: the text includes the
    stop string, which is always among the tokens. A tuple, because every turn makes and hashes one: a frozen dataclass
    takes three times as long to make.
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
        """Return `temperature` and every field that differs from its default, as in `sampling` of an export."""
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
    """The answer must be a text that matches `regex` or `ebnf`, or one of `choices`, or else JSON.

    JSON is any object, or a value of the JSON `schema`. `ebnf`: a grammar in the notation of xgrammar. `param`: the
    request field that demands the format. `strict`: as sent with a schema, for external models; engines always obey it.
    """

    schema: Mapping[str, Json] | None = None
    regex: str | None = None
    ebnf: str | None = None
    choices: tuple[str, ...] = ()
    param: str = "response_format"
    strict: bool | None = field(default=None, repr=False)  # hashes of requests are made of the rest


class PromptText(NamedTuple):
    """A prompt that is a text, not a chat. `special`: the tokenizer's tokens before a text (BOS) come first."""

    text: str
    special: bool = True


@dataclass(slots=True)
class TurnRequest:
    """A parsed request of any API: the conversation to continue, how to sample, and how to reply.

    `template_options`: arguments of the chat template (chat_template_kwargs, reasoning effort); they are part of a
    root's identity. `given`: sampling fields that the client set. `dropped`: request fields that were ignored.
    `previous_id`: `previous_response_id`; `messages` are then only the new ones. `echo`: fields that the reply repeats
    unchanged. `retry`: the client marked the request as a retry. `input_ids`: the prompt as token ids, instead of
    `messages`. `text`: the prompt as a text, instead of both. `return_token_ids`: the reply has the ids of the prompt
    and of each choice. `per_token`: the reply has every sampled token, in order, with its logprob if `logprobs` is set
    (`TokensDelta`). `names_ids`: logprobs name a token by its id instead of its text. `prefill`: the beginning of the
    answer, which the client wrote and the model continues; it is not one of `messages`. `return_completion_text`: the
    reply has the text of each choice as sampled, markup included. `tool_parser`: the name of the tool-call format;
    None: the model's own. `timeline`: the stages that the request has reached. `images`: the images of the image tokens
    in `input_ids`, in their order. `files`: the images of the request that are not yet stored with its session, by
    digest. `sender`: the sender of the request. `route`: the name of the route that serves it, "" without a table of
    models; `pinned`: the adapter version that it names (`policy@7`). `reasoning_fields`: the fields of the Messages API
    that configure reasoning, as sent, for external models. `further_prompts`: prompts
    of the same request after this one, each for a turn of its own; `prompt_number`: the place of this one among them,
    from 0. `score_prompt`: the reply has the logprobs of the
    prompt, which are in `prompt_logprobs` in the form of the API before the turn begins. `thread`: the client's own
    name of the conversation.

    Headers set some of the fields (`api.client_hints`), then the session does (`turns.defaults`); after that, the
    request does not change.
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
    route: str = ""
    pinned: int | None = None
    outside: bool = False
    reasoning_fields: Mapping[str, Json] = field(default_factory=dict)
    further_prompts: tuple[Ids | PromptText, ...] = field(default=(), compare=False, repr=False)
    prompt_number: int = field(default=0, compare=False, repr=False)
    score_prompt: bool = False
    prompt_logprobs: Mapping[str, Sequence[Json]] = field(default_factory=dict, compare=False, repr=False)
    thread: Thread | None = None


class Continued(NamedTuple):
    """The exact ids of the first `messages` messages of a request. The last message is an answer, sampled as the last
    `output_tokens` of `ids`."""

    messages: int
    ids: Ids
    output_tokens: int


class Parsing(NamedTuple):
    """How to parse an output that is not a turn.

    Tool calls are read if there are `tools` or a `tool_parser`, otherwise they stay text. The parsers have the names of
    `--tool-parser` and `--reasoning-parser`; None: the model's own. `prompt_ids`: the end of the prompt before the
    output, which may have opened reasoning; None: the model's generation prompt.
    """

    tools: tuple[Tool, ...] = ()
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    prompt_ids: Ids | None = None


class Thread(NamedTuple):
    """A client's own name of a conversation that goes on over compactions, and that of the thread that began it."""

    id: str
    parent: str | None = None


class Lineage(NamedTuple):
    """The earlier turns that a conversation came from, by id (`trajectory.lineage`)."""

    sources: tuple[str, ...]
    kind: Segment
    evidence: Evidence

    def to_json(self) -> dict[str, Json]:
        """The lineage as JSON."""
        return {"from": list(self.sources), "kind": self.kind.value, "evidence": self.evidence.value}


class Sampler(NamedTuple):
    """What sampled tokens. `server`: the URL of an engine server, "" for an engine in this process. `dtype` and
    `quantization` of its weights, in its own words; "" if it does not tell them or has none.
    """

    server: str = ""
    dtype: str = ""
    quantization: str = ""


@dataclass(slots=True)
class Interaction:
    """One node of a session's tree: what one call added, exactly as sent to and sampled by the engine.

    `aligned`: the prompt begins with the parent's prompt and output, token for token. `prefix_length` is then their
    length and `prompt_suffix` the ids after them; otherwise `prefix_length` is 0 and `prompt_suffix` the whole prompt.
    `new_messages`: the messages after the parent's answer; for a root, all messages. `tools` and `template_options`:
    stored only for a root; other nodes share their root's. `reward`: as set, before discounting. `seq`: the order of
    completion within the session, from 0, assigned by the commit. Times are Unix seconds.

    `dropped`: request fields that were ignored. `best_effort`: sampling fields that were sent to an engine that does
    not promise to honour them. `echo`: how the client changed our answers in its history; the sampled answers were used
    instead. `prefill`: the number of characters of the answer's text that the client wrote; their tokens are part of
    the prompt. `idempotency_key`, `request_id`: the client's headers. `grammar`: the output was sampled under a
    grammar. `unmasked_logprobs`: for an output under a grammar, the logprobs before its mask, one per output id, if the
    engine reports them. `has_logprobs` False: the output came as text or without logprobs, `logprobs` are zeros, and
    the interaction is never trained. `asked`: the options of the requested reply (`turns.reply_options`).
    `malformed_calls`: tool calls that could not be parsed and were left as text. `uncertain`: `versions` contains a
    version that was only assumed, namely the last known one, because the engine reported a version that nobody
    published, or because the weights changed within a part of the output. `logprobs_of`: the distribution that
    `logprobs` are of; if it changed within the output, the one furthest from the rule. `replay`: the side columns that
    it recorded, and the number of missing rows of each (`proxy.side_columns.columns`). `route`: the name of the route
    that answered, "" without a table of models. `route_kind`: its kind then. Only turns of kind `policy` are trained.
    `adapter`: the version of the LoRA adapter that sampled it; None: the base model. `versions` count per route. A turn
    of kind `external` has no tokens; `external`: the `model` that answered, in its own words, and its counts of tokens,
    as far as it told them. `samplers`: what sampled the output, each with the index of its first token; empty if
    nothing is known of it. `thread`, `lineage`: of a root, the client's thread, and which earlier turns the
    conversation came from; None if nothing shows any.
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
    logprobs_of: LogprobsOf = LogprobsOf.RULE
    replay: Mapping[str, int] = field(default_factory=dict)
    route: str = ""
    route_kind: RouteKind = RouteKind.POLICY
    adapter: int | None = None
    external: Mapping[str, Json] = field(default_factory=dict)
    samplers: tuple[tuple[int, Sampler], ...] = ()
    thread: Thread | None = None
    lineage: Lineage | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the whole prompt in tokens, including the prefix shared with the parent."""
        return self.prefix_length + len(self.prompt_suffix)

    @property
    def sampled_tokens(self) -> int:
        """The tokens that count for limits. An external model that tells none counts one for each 4 characters."""
        if self.route_kind is not RouteKind.EXTERNAL:
            return len(self.output_ids)
        told: int | None = self.external.get("completion_tokens")
        return -(-len(self.output.content) // 4) if told is None else told

    @property
    def sampled_output(self) -> Message:
        """The part of `output` that the model wrote, without the beginning that the client wrote."""
        if not self.prefill:
            return self.output
        return self.output._replace(content=self.output.content[self.prefill :], reasoning=None)


class PauseNote(NamedTuple):
    """A note in the database that the server `owner` has paused the engine server at `url`.

    `mode`: a PauseMode. `released`: the kinds of memory that it released, separated by commas. `until`: the time at
    which the note expires unless it is renewed, in Unix seconds.
    """

    url: str
    owner: str
    mode: str
    released: str
    until: float


@dataclass(slots=True)
class SessionRecord:
    """The stored fields of a session, without its interactions. Times are Unix seconds.

    The `*_key_hash` fields are SHA-256 hex digests. `sampling`: defaults for turns. `turn_options`: the given fields of
    `tokengrove.options.start.TurnOptions`. `limits`: the given fields of `Limits` there. `keys_expire_at`: when its
    keys expire; None: never. `group_size`: claims return the session only together with its group, once the group has
    this many sessions and all have ended. `took_capacity`: it uses one of the granted starts, which is returned if the
    session fails. `series`: for a session that was opened after the end of another, the id of the first of them
    (`default`). `reward_scope`: the scope by which exports score it unless they set another; None: the tree decides.
    `score`: the score of the whole session, given at its end; None: the score of its turns' rewards.
    `delivery`: who gives it to trainers. `withdrawn_at`: when it was withdrawn; None: it was not. A withdrawn session
    has ended.
    """

    session_id: str
    task_id: str = ""
    group_id: str | None = None
    status: SessionStatus = SessionStatus.ACTIVE
    api_key_hash: str | None = None
    control_key_hash: str | None = None
    path_key_hash: str | None = None
    feedback_key_hash: str | None = None
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
        """Whether it measures a policy (`validate: true` in its metadata) and must therefore not be trained on."""
        return self.metadata.get(VALIDATE) is True


class ListedSession(NamedTuple):
    """A session of a listing. Its content is unchanged while `turns` (of any status) and `revision` are the same."""

    record: SessionRecord
    turns: int
    revision: int


class Outline(NamedTuple):
    """The interactions of a session, by seq, without tokens and texts; only roots have the texts of their prompt.

    `prompt_tokens`, `output_tokens`: sums over complete interactions. `versions`: the least and the greatest weight
    version that sampled a token of a complete interaction of a trained route; None without tokens.
    """

    steps: list[Interaction]
    prompt_tokens: int
    output_tokens: int
    versions: tuple[int, int] | None


class GroupSummary(NamedTuple):
    """Counts of the sessions of a group. `by_status`: numbers of sessions. Times are Unix seconds.

    `number`: the place of its first session in the order of creation. `size`: the number of sessions that it needs to
    be claimed.
    """

    group_id: str
    number: int
    size: int | None
    by_status: dict[SessionStatus, int]
    created_at: float
    last_at: float
