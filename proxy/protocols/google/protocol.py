"""Parses requests of Google's generateContent. Each name may be in camel case or in snake case.

honoured  contents systemInstruction tools (functionDeclarations) toolConfig (functionCallingConfig: mode
          allowedFunctionNames) generationConfig and the engine extensions return_token_ids return_completion_text
          structured_outputs (json json_object regex choice grammar) regex ebnf
          generationConfig: temperature topP topK maxOutputTokens stopSequences candidateCount seed presencePenalty
          frequencyPenalty responseLogprobs logprobs responseMimeType responseSchema responseJsonSchema
          responseModalities (text only) mediaResolution (of images) thinkingConfig (includeThoughts thinkingLevel, and
          thinkingBudget 0, which sets the template option enable_thinking to false);
          a last content from the model (prefill), whose text the answer continues
ignored   safetySettings labels serviceTier store model; other values of thinkingBudget; generationConfig:
          audioTimestamp enableAffectiveDialog enableEnhancedCivicAnswers imageConfig modelSelectionConfig
          routingConfig speechConfig; tools that only Google runs; and every field not named here (recorded as dropped)
refused   cachedContent continuationToken; generationConfig: responseFormat translationConfig
          audioTranscriptionConfig; the tool computerUse; vLLM's former guided_json guided_regex guided_choice
          guided_grammar guided_decoding_backend guided_whitespace_pattern; parts that only Google writes, other media
          than images, and images unless it is a vision model
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from proxy.parsed_items import ParsedBodies
from proxy.protocols.answer_format import FORMAT_FIELDS, FORMER_FIELDS, parse_answer_format
from proxy.protocols.common_fields import effort_options
from proxy.protocols.fields import (
    expect_list,
    expect_object,
    expect_str,
    expect_text,
    optional_bool,
    optional_float,
    optional_int,
    optional_str,
)
from proxy.protocols.google.contents import parse_contents, parse_system
from proxy.protocols.google.names import given, in_camel
from proxy.protocols.google.reply import SHOWN_THOUGHTS, ContentArray, ContentStream, response_json
from proxy.protocols.google.request_body import google_body
from proxy.protocols.google.schemas import json_schema
from proxy.protocols.google.tools import parse_tool_choice, parse_tools
from proxy.protocols.prefill import take_prefill
from proxy.protocols.wire_protocol import Answer, ordered_hex
from proxy.types import Api, Ids, Message, ResponseFormat, Role, SamplingParams, TurnRequest
from tokengrove.errors import InvalidRequest, UnsupportedParameter, brief

HONOURED = frozenset(
    {
        *("contents", "systemInstruction", "tools", "toolConfig", "generationConfig"),
        *("return_token_ids", "return_completion_text"),
        *FORMAT_FIELDS,
    }
)
IGNORED = frozenset({"safetySettings", "labels", "serviceTier", "store", "model"})
_REFUSED = frozenset({"cachedContent", "continuationToken"})
REFUSED = _REFUSED | FORMER_FIELDS
_FIELDS = HONOURED | IGNORED | REFUSED

CONFIG = frozenset(
    {
        *("temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "candidateCount", "seed", "logprobs"),
        *("presencePenalty", "frequencyPenalty", "responseLogprobs", "responseMimeType", "responseSchema"),
        *("responseJsonSchema", "responseModalities", "mediaResolution", "thinkingConfig"),
    }
)
"""The honoured fields of `generationConfig`."""
IGNORED_CONFIG = frozenset(
    {
        *("audioTimestamp", "enableAffectiveDialog", "enableEnhancedCivicAnswers", "imageConfig"),
        *("modelSelectionConfig", "routingConfig", "speechConfig"),
    }
)
REFUSED_CONFIG = frozenset({"responseFormat", "translationConfig", "audioTranscriptionConfig"})
_CONFIG = CONFIG | IGNORED_CONFIG | REFUSED_CONFIG
THINKING = frozenset({"includeThoughts", "thinkingBudget", "thinkingLevel"})

_AT = "generationConfig."
_SAMPLING: tuple[tuple[str, str, Callable[..., float | None], float, float], ...] = (
    ("temperature", "temperature", optional_float, 0.0, 100.0),
    ("topP", "top_p", optional_float, 0.0, 1.0),
    ("topK", "top_k", optional_int, 0, 2**31 - 1),
    ("presencePenalty", "presence_penalty", optional_float, -2.0, 2.0),
    ("frequencyPenalty", "frequency_penalty", optional_float, -2.0, 2.0),
    ("seed", "seed", optional_int, -(2**63), 2**63 - 1),
    ("maxOutputTokens", "max_tokens", optional_int, 1, 2**31 - 1),
)
_MAX_CHOICES = 128
_MAX_TOP_LOGPROBS = 20
_MAX_STOP_SEQUENCES = 64


class StreamForm(Enum):
    """How a streamed reply is written: as server-sent events (`alt=sse`), or as one JSON array."""

    EVENTS = ContentStream
    ARRAY = ContentArray


class GoogleProtocol:
    """Google's generateContent, `/v1beta/models/MODEL:generateContent`. The address names the model.

    `form`: how the reply is streamed; None: it is not.
    """

    api = Api.GOOGLE

    def __init__(self, form: StreamForm | None = None) -> None:
        self._form = form

    def new_id(self) -> str:
        return "gen_" + ordered_hex()

    def parse(self, body: Any, bodies: ParsedBodies | None = None) -> TurnRequest:
        sent = in_camel(expect_object(body, "body"), _FIELDS)
        for name in sorted(_REFUSED & sent.keys()):
            if sent[name]:
                raise UnsupportedParameter(f"'{name}' is not supported by this server; leave it out", param=name)
        dropped = sorted(name for name in given(sent) if name not in HONOURED)
        config = in_camel(_object(sent, "generationConfig"), _CONFIG)
        _check_config(config, dropped)
        tool_choice, tools = parse_tool_choice(sent.get("toolConfig"), parse_tools(sent.get("tools"), dropped), dropped)
        sampling = _parse_sampling(config)
        logprobs = optional_bool(config, "responseLogprobs", at=_AT)
        options, shown = _parse_thinking(config, dropped)
        return_token_ids = optional_bool(sent, "return_token_ids")
        request = TurnRequest(
            api=Api.GOOGLE,
            model="",
            messages=_parse_messages(sent, dropped, bodies),
            tools=tools,
            tool_choice=tool_choice,
            sampling=SamplingParams(**sampling),
            given=frozenset(sampling),
            template_options=options,
            stream=self._form is not None,
            logprobs=logprobs,
            top_logprobs=_parse_top_logprobs(config, logprobs),
            n=optional_int(config, "candidateCount", least=1, most=_MAX_CHOICES, at=_AT) or 1,
            response_format=parse_answer_format(sent, _parse_format(config)),
            echo={SHOWN_THOUGHTS: True} if shown else {},
            return_token_ids=return_token_ids,
            return_completion_text=optional_bool(sent, "return_completion_text"),
        )
        request.dropped = tuple(dropped)
        if request.messages[-1].role is Role.ASSISTANT:
            take_prefill(request, f"contents[{len(sent['contents']) - 1}]")
        return request

    def parse_count(self, body: Any, bodies: ParsedBodies | None = None) -> TurnRequest:
        """Parse a request of `:countTokens`: `contents`, or a whole request in `generateContentRequest`."""
        sent = in_camel(expect_object(body, "body"), frozenset({"generateContentRequest"}))
        whole = sent.get("generateContentRequest")
        return self.parse(sent if whole is None else expect_object(whole, "generateContentRequest"), bodies)

    def body(self, request: TurnRequest) -> dict[str, Any]:
        return google_body(request)

    def reply(self, request: TurnRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        return response_json(request, answers)

    def stream(
        self, request: TurnRequest, reply_id: str, created: int, prompt_tokens: int, prompt_ids: Ids | None = None
    ) -> ContentStream:
        form: type[ContentStream] = ContentStream if self._form is None else self._form.value
        return form(request, reply_id)


def _object(body: Mapping[str, Any], name: str, at: str = "") -> Mapping[str, Any]:
    value = body.get(name)
    return {} if value is None else expect_object(value, at + name)


def _check_config(config: Mapping[str, Any], dropped: list[str]) -> None:
    """Refuse fields and modalities that ask for another form of the answer, and name the ignored ones."""
    for name in sorted(given(config)):
        if name in REFUSED_CONFIG:
            raise UnsupportedParameter(f"'{_AT}{name}' is not supported; leave it out", param=_AT + name)
        if name not in CONFIG:
            dropped.append(_AT + name)
    at = f"{_AT}responseModalities"
    for index, kind in enumerate(expect_list(config.get("responseModalities") or [], at)):
        if expect_str(kind, f"{at}[{index}]").upper() not in ("TEXT", "MODALITY_UNSPECIFIED"):
            raise UnsupportedParameter(f"'{at}' has {brief(kind)}; this server answers with text", param=at)


def _parse_messages(body: Mapping[str, Any], dropped: list[str], bodies: ParsedBodies | None) -> tuple[Message, ...]:
    if body.get("contents") is None:
        raise InvalidRequest("'contents' is missing", param="contents")
    values = expect_list(body["contents"], "contents")
    if not values:
        raise InvalidRequest("'contents' must hold at least one content", param="contents")
    system = parse_system(body.get("systemInstruction"), dropped)
    conversation = parse_contents(values, bodies)
    dropped += conversation.dropped
    return (*system, *conversation.messages)


def _parse_sampling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of SamplingParams that `generationConfig` sets."""
    found: dict[str, Any] = {}
    for name, field, parse, least, most in _SAMPLING:
        if (value := parse(config, name, least=least, most=most, at=_AT)) is not None:
            found[field] = value
    at = f"{_AT}stopSequences"
    stop = tuple(
        expect_text(each, f"{at}[{k}]") for k, each in enumerate(expect_list(config.get("stopSequences") or [], at))
    )
    if len(stop) > _MAX_STOP_SEQUENCES:
        message = f"'{at}' has {len(stop)} strings; at most {_MAX_STOP_SEQUENCES} are allowed"
        raise InvalidRequest(message, param=at)
    if "" in stop:
        raise InvalidRequest(f"'{at}' must not hold an empty string", param=at)
    return {**found, "stop": stop} if stop else found


def _parse_top_logprobs(config: Mapping[str, Any], wanted: bool) -> int:
    top = optional_int(config, "logprobs", least=0, most=_MAX_TOP_LOGPROBS, at=_AT) or 0
    if top and not wanted:
        raise InvalidRequest(f"'{_AT}logprobs' needs '{_AT}responseLogprobs': true", param=f"{_AT}logprobs")
    return top


def _parse_thinking(config: Mapping[str, Any], dropped: list[str]) -> tuple[dict[str, Any], bool]:
    """Return the template options that `thinkingConfig` sets, and whether the reply shows reasoning."""
    at = f"{_AT}thinkingConfig."
    thinking = in_camel(_object(config, "thinkingConfig", _AT), THINKING)
    dropped += (at + name for name in sorted(given(thinking)) if name not in THINKING)
    options: dict[str, Any] = {}
    level = optional_str(thinking, "thinkingLevel", at)
    if level is not None and level.upper() != "THINKING_LEVEL_UNSPECIFIED":
        options = effort_options(level.lower())
    budget = optional_int(thinking, "thinkingBudget", least=-1, at=at)
    if budget == 0:
        options["enable_thinking"] = False
    elif budget is not None and budget > 0:
        dropped.append(f"{at}thinkingBudget")
    return options, optional_bool(thinking, "includeThoughts", at=at)


def _parse_format(config: Mapping[str, Any]) -> ResponseFormat | None:
    """Return the format that `responseMimeType` demands, with the schema beside it."""
    at, schema = f"{_AT}responseJsonSchema", config.get("responseJsonSchema")
    if schema is not None:
        schema = expect_object(schema, at)
    elif config.get("responseSchema") is not None:
        at = f"{_AT}responseSchema"
        schema = json_schema(config["responseSchema"], at)
    kind = optional_str(config, "responseMimeType", _AT) or "text/plain"
    match kind:
        case "application/json":
            return ResponseFormat(schema, param=f"{_AT}responseMimeType" if schema is None else at)
        case "text/x.enum":
            choices = [] if schema is None else schema.get("enum") or []
            if not choices or not all(isinstance(each, str) and each for each in choices):
                raise InvalidRequest(f"'{at}' needs an 'enum' of texts for text/x.enum", param=at)
            return ResponseFormat(choices=tuple(choices), param=at)
        case "text/plain" if schema is None:
            return None
        case "text/plain":
            raise InvalidRequest(f"'{at}' needs '{_AT}responseMimeType': 'application/json'", param=at)
        case _:
            message = f"'{_AT}responseMimeType' must be text/plain, application/json or text/x.enum, not {brief(kind)}"
            raise InvalidRequest(message, param=f"{_AT}responseMimeType")
