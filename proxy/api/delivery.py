"""The body of `/mailbox/deliver` -> an answer: token ids, text, a chat message or an error. Errors name the field."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.api.known_fields import check_given, refuse
from proxy.engine.chunks import LARGEST_LOGPROB
from proxy.engine.mailbox import Delivery, failure
from proxy.engine.requests import GenerateRequest
from proxy.engine.versions import LARGEST_VERSION
from proxy.protocols.chat.input_messages import parse_message
from proxy.protocols.fields import expect_list, expect_object, optional_int, optional_text, parse_token_ids
from proxy.rendering.bridge import TAIL
from proxy.rendering.renderer import Renderer
from proxy.rendering.written_answers import write_delivered
from proxy.types import Logprobs, Message, Role
from tokengrove.errors import InvalidRequest, ProxyError, classes_by, told
from tokengrove.reasons import FinishReason

_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
# The finish reasons of a chat completion. Tool calls are read from its message.
_OF_COMPLETIONS = {**_FINISHES, "tool_calls": FinishReason.STOP, "content_filter": FinishReason.CONTENT_FILTER}
_BY_CODE = classes_by("code")
_ANSWERS = ("message", "response", "text", "output_ids", "error")
_FIELDS = ("interaction_id", "request_id", "session_id", "turn", *_ANSWERS, "logprobs", "finish_reason", "version")


@dataclass(frozen=True, slots=True)
class DeliveredMessage:
    """A chat message as an answer, to be written in the format of the model family. `field`: its field in the body."""

    message: Message
    field: str
    version: int | None
    finish: FinishReason

    def written(self, renderer: Renderer, request: GenerateRequest) -> Delivery:
        """The answer as token ids without logprobs. Raises InvalidRequest if this model cannot express it."""
        if request.turn is None:
            raise InvalidRequest(
                f"this request has token ids and no messages; answer with 'output_ids' instead of '{self.field}'",
                param=self.field,
            )
        ids = write_delivered(renderer, request.turn, request.prompt.tail(TAIL), self.message)
        if self.finish is FinishReason.LENGTH:
            ids = ids[:-1]  # a truncated answer has no end token
        elsewhere = self.field == "response"
        return Delivery(None, ids, None, self.version, self.finish, self.field, counted_elsewhere=elsewhere)


def parse_delivery(body: Mapping[str, Any]) -> Delivery | DeliveredMessage | ProxyError:
    """The answer in a body. Raises InvalidRequest for no or several answers, and for fields that do not apply."""
    check_given(body, _FIELDS)
    given = [name for name in _ANSWERS if body.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"give exactly one of {', '.join(_ANSWERS)}", param=given[1] if given else "text")
    [kind] = given
    if kind != "output_ids":
        refuse(body, ("logprobs",), "applies only with 'output_ids'")
    version = optional_int(body, "version", least=0, most=LARGEST_VERSION)
    if kind == "error":
        return _parse_error(body)
    if kind == "response":
        refuse(body, ("finish_reason",), "does not apply with 'response', which has its own")
        return _parse_completion(expect_object(body["response"], "response"), version)
    finish = _parse_finish(body.get("finish_reason"), _FINISHES, "finish_reason")
    if kind == "message":
        message = _parse_answer(body["message"], "message")
        return DeliveredMessage(message, "message", version, finish or FinishReason.STOP)
    if kind == "text":
        return Delivery(text=optional_text(body, "text"), version=version, finish=finish)
    ids = parse_token_ids(body["output_ids"], "output_ids")
    return Delivery(output_ids=ids, logprobs=_parse_logprobs(body.get("logprobs")), version=version, finish=finish)


def _parse_error(body: Mapping[str, Any]) -> ProxyError:
    """The error in a message or an OpenAI-style `error`. Errors that are not the client's fault are engine failures."""
    if not isinstance(body["error"], Mapping):
        return failure(str(optional_text(body, "error")))
    error = body["error"]
    message = optional_text(error, "message", "error.") or "the request failed elsewhere"
    kind = _BY_CODE.get(optional_text(error, "code", "error.") or "")
    if kind is None or kind.status >= 500:
        return failure(message)
    return told(kind, message, param=optional_text(error, "param", "error."))


def _parse_completion(response: Mapping[str, Any], version: int | None) -> DeliveredMessage:
    """The only choice of a `chat.completion` object. Its other fields have no effect."""
    choices = expect_list(response.get("choices"), "response.choices")
    if len(choices) != 1:
        raise InvalidRequest(
            f"'response.choices' must hold one choice, not {len(choices)}: each request of the mailbox has one answer",
            param="response.choices",
        )
    name = "response.choices[0]"
    choice = expect_object(choices[0], name)
    finish = _parse_finish(choice.get("finish_reason"), _OF_COMPLETIONS, f"{name}.finish_reason")
    message = _parse_answer(choice.get("message"), f"{name}.message")
    return DeliveredMessage(message, "response", version, finish or FinishReason.STOP)


def _parse_answer(value: Any, name: str) -> Message:
    message = parse_message({"role": "assistant", **expect_object(value, name)}, name)
    if message.role is not Role.ASSISTANT:
        raise InvalidRequest(f"'{name}.role' must be assistant", param=f"{name}.role")
    return message


def _parse_finish(value: Any, known: Mapping[str, FinishReason], name: str) -> FinishReason | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in known:
        raise InvalidRequest(f"'{name}' must be one of {', '.join(known)}", param=name)
    return known[value]


def _parse_logprobs(value: Any) -> Logprobs | None:
    if value is None:
        return None
    try:
        values = expect_list(value, "logprobs")
        if any(isinstance(item, bool) for item in values):
            raise TypeError
        logprobs = array("f", values)
    except (TypeError, OverflowError):
        raise InvalidRequest("'logprobs' must be a list of numbers", param="logprobs") from None
    if not all(-1e30 < number <= LARGEST_LOGPROB for number in logprobs):
        raise InvalidRequest(
            "'logprobs' must be natural logarithms of probabilities: finite and at most 0", param="logprobs"
        )
    return logprobs
