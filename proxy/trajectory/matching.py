"""The identity of a conversation: a hash chain over its messages. A parent is found in time linear in their number.

Two messages are equal if role, text, image digests, parsed tool calls and result text are equal, and tool-call ids
agree up to consistent renaming. Reasoning, names, item ids and provider fields do not count. A message that came as
token ids is identified by these ids, never by its text. The hashes are fast and non-cryptographic: every match is
verified on token ids before tokens are joined.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jiter
import orjson
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from proxy.types import TOKENS, ImagePart, Message, Role, SamplingParams, Tool, ToolCall, TurnRequest

# Looked up once: in Python 3.11, finding an enum member takes as long as hashing a short message.
_SYSTEM, _ASSISTANT, _TOOL = Role.SYSTEM, Role.ASSISTANT, Role.TOOL
_ROLE_NUMBER = {role: number for number, role in enumerate(Role)}
# Integers of up to 53 bits are exact as doubles; integers beyond 1024 bits exceed the largest double.
_DOUBLE_BITS, _LARGEST_DOUBLE_BITS = 53, 1024
_UNKNOWN_CALL = -1
_NO_CALL = -2
_THINKING = ("<think>", "<thinking>")


class RootKeys(NamedTuple):
    """Hashes of the head of a prompt: tools, leading system messages, template options; and of the route, 0 if unnamed.

    A turn continues turns of its own route only: another model's answer is context, and its tokens are not the route's.
    """

    tools: int
    system: int
    options: int
    route: int = 0

    @property
    def start(self) -> ChainState:
        """The chain before the first message after the head."""
        if not self.route:
            return ChainState(key=hash((self.tools, self.system, self.options)), body_key=0)
        return ChainState(key=hash((self.tools, self.system, self.options, self.route)), body_key=self.route)


class ChainState(NamedTuple):
    """The chain after some messages. `key` includes the head, `body_key` does not; `calls`: the latest call ids.

    `echo`: a chain over the reasoning, origins and call ids of answers, which distinguish retries only.
    """

    key: int
    body_key: int
    calls: tuple[str, ...] = ()
    echo: int = 0


class Identity(NamedTuple):
    """The identity of a request. `states[i]` is the chain i messages after the `lead` leading system messages."""

    root: RootKeys
    lead: int
    states: tuple[ChainState, ...]

    @property
    def end(self) -> ChainState:
        """The chain after the whole conversation."""
        return self.states[-1]


_EMPTY_BODY = ChainState(key=0, body_key=0)


def identify(
    messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any], route: str = ""
) -> Identity:
    """Compute the identity of a conversation with a route, in time linear in its text."""
    lead = count_leading_system(messages)
    root = root_keys(messages[:lead], tools, options, route)
    return Identity(root, lead, tuple(extend(root.start, messages[lead:])))


def root_keys(
    system: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any], route: str = ""
) -> RootKeys:
    """The hashes of a head; `system` are its leading system messages."""
    return RootKeys(
        _tools_key(tools) if tools else 0,
        extend(_EMPTY_BODY, system)[-1].body_key if system else 0,
        _json_key(options) if options else 0,
        _text_key(route) if route else 0,
    )


def route_key(route: str) -> int:
    """The hash of a route's name; 0 for "", the only route of a server without a table of models."""
    return _text_key(route) if route else 0


def count_leading_system(messages: Sequence[Message]) -> int:
    """The number of system messages at the head of a conversation."""
    for index, message in enumerate(messages):
        if message.role is not _SYSTEM:
            return index
    return len(messages)


def extend(state: ChainState, messages: Sequence[Message]) -> list[ChainState]:
    """The states of the chain before the first and after each of `messages`: len(messages) + 1 states."""
    states = [state]
    key, body_key, calls, echo = state
    for message in messages:
        link = message_key(message, calls)
        if message.role is _ASSISTANT:
            plain = message.reasoning is None and message.origin is None and not message.tool_calls
            echo = hash((echo, 0 if plain else _echo_key(message)))
        if message.tool_calls:
            calls = tuple([call.id for call in message.tool_calls])
        key, body_key = hash((key, link)), hash((body_key, link))
        states.append(ChainState(key, body_key, calls, echo))
    return states


def _echo_key(answer: Message) -> int:
    return _text_key(repr((answer.reasoning, answer.origin, [call.id for call in answer.tool_calls])))


def message_key(message: Message, calls: tuple[str, ...]) -> int:
    """A 64-bit key of one message. `calls` are the ids of the latest assistant message that had tool calls.

    A tool result is identified by the position of its call in `calls`, so ids are equal up to consistent renaming.
    """
    role, content, tool_calls, call_id, _, name, images, _ = message
    if role is _ASSISTANT:
        content = visible(content)
    text = xxh3_64_intdigest(content.encode(errors="surrogatepass"))
    number = _ROLE_NUMBER[role]
    if name is not None and name.startswith(TOKENS):
        return hash((number, text, _text_key(name), *(map(_image_key, images) if images else ())))
    if not (tool_calls or images or role is _TOOL):
        return hash((number, text))
    called = tuple([_call_key(call) for call in tool_calls])
    answered = _call_position(call_id, calls) if role is _TOOL else _NO_CALL
    return hash((number, text, called, answered, tuple([_image_key(image) for image in images])))


def _image_key(image: ImagePart) -> int:
    return _text_key(f"{image.digest} {image.at} {image.detail}")


def visible(text: str) -> str:
    """The part of an assistant text that identifies it: LF for CRLF, no outer white space, and no leading <think> or
    <thinking> block.

    Answers of this server have neither the white space nor the block; clients add them.
    """
    if "\r\n" in text:
        text = text.replace("\r\n", "\n")
    text = text.strip()
    if text.startswith(_THINKING):
        tag = text[: text.index(">") + 1]
        _, closed, rest = text.partition(f"</{tag[1:]}")
        return rest.strip() if closed else text
    return text


def _text_key(text: str) -> int:
    return xxh3_64_intdigest(text.encode(errors="surrogatepass"))


def _call_key(call: ToolCall) -> int:
    return hash(
        (
            _text_key(call.name),
            xxh3_64_intdigest(canonical_arguments(call.arguments)),
        )
    )


def _call_position(call_id: str | None, calls: tuple[str, ...]) -> int:
    try:
        return calls.index(call_id) if call_id is not None else _UNKNOWN_CALL
    except ValueError:
        return _UNKNOWN_CALL


def canonical_arguments(text: str) -> bytes:
    """Canonical JSON of a call's arguments: sorted keys, no spaces, 1.0 as 1, empty text as {}.

    Text that is not JSON, is nested too deeply or repeats a key of an object is returned unchanged: parsers differ in
    which of the repeated values they keep. NaN, Infinity and -Infinity are values of their own. Truncated JSON (a call
    that reached the length limit) is closed where it ends, as clients echo it. An integer beyond 2**53 becomes the
    nearest double, as JavaScript clients echo it.
    """
    if not text.strip():
        return b"{}"
    try:
        return _sorted_json(argument_value(text))
    except (ValueError, RecursionError):
        return text.encode(errors="surrogatepass")


def argument_value(text: str) -> Any:
    """The value of JSON text as `canonical_arguments` compares it. Raises ValueError or RecursionError."""
    return _integral(_loaded(text), doubles=True)


def _loaded(text: str) -> Any:
    """Decode JSON text, which may contain NaN or lone surrogates, or be truncated.

    Raises ValueError for other text, and for an object that repeats a key.
    """
    try:
        return jiter.from_json(text.encode(), catch_duplicate_keys=True)
    except ValueError:
        pass
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except json.JSONDecodeError:
        partial = text.encode(errors="replace")
        return jiter.from_json(partial, partial_mode="trailing-strings", catch_duplicate_keys=True)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is repeated")
    return value


def canonical_json(value: Any) -> bytes:
    """Canonical bytes of a JSON value: equal if and only if the values are equal."""
    return _sorted_json(_integral(value))


def _sorted_json(value: Any) -> bytes:
    try:
        packed = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        if b"null" not in packed or not _has_infinite(value):
            return packed
    except orjson.JSONEncodeError:  # integers beyond 64 bits, lone surrogates
        pass
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _has_infinite(value: Any) -> bool:
    """Whether a number in a value is NaN or infinite: orjson writes null for it."""
    if isinstance(value, float):
        return not math.isfinite(value)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(_has_infinite, parts))


def _integral(value: Any, *, doubles: bool = False) -> Any:
    """Replace whole floats with integers at every depth; with `doubles`, round integers beyond 2**53 to doubles."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if doubles and isinstance(value, int) and _DOUBLE_BITS < value.bit_length() < _LARGEST_DOUBLE_BITS:
        return int(float(value))
    if isinstance(value, Mapping):
        return {key: _integral(item, doubles=doubles) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_integral(item, doubles=doubles) for item in value]
    return value


def _tools_key(tools: Sequence[Tool]) -> int:
    # `strict` is not part of a tool's identity: only some APIs have it and templates do not see it.
    return (
        xxh3_64_intdigest(_plain_json([[tool.name, tool.description, tool.parameters] for tool in tools]))
        if tools
        else 0
    )


def _plain_json(value: Any) -> bytes:
    """Sorted JSON with unchanged numbers: schemas are long, and no client rewrites their numbers."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # integers beyond 64 bits
        return canonical_json(value)


def _json_key(value: Mapping[str, Any]) -> int:
    return xxh3_64_intdigest(canonical_json(value)) if value else 0


def request_hash(request: TurnRequest, sampling: SamplingParams, identity: Identity) -> str:
    """A hash of conversation, `sampling` and answer format, 32 hex digits. It identifies a retry within its session.

    `stream` is not part of it: a client that falls back from streaming to a plain request retries the same request.
    """
    end = identity.states[-1]
    parts = (
        str(request.api),
        request.model,
        end.key,
        str(request.tool_choice.mode),
        request.tool_choice.name,
        request.parallel_tool_calls,
        tuple(sampling),
        request.n,
        request.response_format,
        request.top_logprobs if request.logprobs else None,
        None if request.input_ids is None else xxh3_64_intdigest(request.input_ids.tobytes()),
        end.echo,  # equal in an exact repetition; distinguishes siblings with equal conversations
        *(() if request.prefill is None else (request.prefill,)),
        *(map(_image_key, request.images) if request.images else ()),
        *((request.per_token, request.names_ids) if request.per_token else ()),
    )
    return xxh3_128_hexdigest(repr(parts).encode(errors="surrogatepass"))


def messages_hash(messages: Sequence[Message]) -> str:
    """A hash of messages, 16 hex digits. The hash of a turn's new messages is its default `state_hash`."""
    return hash_of_chain(extend(_EMPTY_BODY, messages)[-1])


def hash_of_chain(end: ChainState) -> str:
    """The same of a chain over the messages that began with nothing."""
    return f"{end.body_key & 0xFFFF_FFFF_FFFF_FFFF:016x}"
