"""`/v1/tokenize` and `/v1/detokenize`, as in vLLM: the prompt ids that a turn would have, and the text of ids.

For callers that keep the ids of a conversation themselves, `continue_from` appends to known ids, and `/v1/parse` turns
sampled ids into a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from proxy.protocols.chat.protocol import ChatProtocol, parse_tools
from proxy.protocols.chat.reply import message_json
from proxy.protocols.common_fields import ignored_fields
from proxy.protocols.fields import expect_object, expect_str, optional_bool, optional_int, optional_str, parse_token_ids
from proxy.protocols.openai_choices import FINISH_REASONS
from proxy.types import Api, Continued, Ids, Message, Parsing, PromptText, Role, TurnRequest
from tokengrove.errors import InvalidRequest, UnsupportedParameter
from tokengrove.reasons import FinishReason

OF_CONTINUE_FROM = ("messages", "token_ids", "output_tokens")
OF_PARSE = ("model", "tokens", "tools", "tool_parser", "reasoning_parser", "prompt_ids")
_OF_TEXTS = frozenset({"model", "prompt", "add_special_tokens"})


class ParsedTokenize(NamedTuple):
    """A body of `/v1/tokenize`. `known`: ids to continue. `generation_prompt`: whether an answer begins after them."""

    request: TurnRequest
    known: Continued | None = None
    generation_prompt: bool = True


def parse_tokenize(body: Mapping[str, Any]) -> ParsedTokenize:
    """Parse `messages`, with the other fields of a chat completion and optionally `continue_from`, or parse `prompt`.

    Raises InvalidRequest.
    """
    if (body.get("messages") is None) == (body.get("prompt") is None):
        raise InvalidRequest("give either 'messages' or 'prompt'", param="messages")
    if body.get("prompt") is not None:
        text = expect_str(body["prompt"], "prompt")
        special = optional_bool(body, "add_special_tokens", True)
        if body.get("continue_from") is not None:
            raise InvalidRequest(
                "'continue_from' needs 'messages'; a 'prompt' is encoded as it is", param="continue_from"
            )
        dropped = tuple(ignored_fields(body, _OF_TEXTS))
        model = optional_str(body, "model") or ""
        return ParsedTokenize(TurnRequest(Api.COMPLETIONS, model, (), text=PromptText(text, special), dropped=dropped))
    if optional_bool(body, "add_special_tokens"):
        message = "'add_special_tokens' must be false with 'messages': the chat template writes what a turn needs"
        raise UnsupportedParameter(message, param="add_special_tokens")
    given = {name: value for name, value in body.items() if name not in ("add_special_tokens", "continue_from")}
    prompt = True
    if not optional_bool(body, "continue_final_message"):
        prompt = optional_bool(given, "add_generation_prompt", True)
        given.pop("add_generation_prompt", None)
    request = ChatProtocol().parse(given)
    known = body.get("continue_from")
    if known is not None:
        known = _parse_continued(expect_object(known, "continue_from"), request.messages)
    return ParsedTokenize(request, known, prompt)


def parse_parse(body: Mapping[str, Any]) -> tuple[Ids, Parsing]:
    """Parse a body of `/v1/parse`: the sampled ids, and how to read them. Raises InvalidRequest."""
    tools, _ = parse_tools(body.get("tools"))
    before = body.get("prompt_ids")
    return _parse_ids(body.get("tokens"), "tokens"), Parsing(
        tools=tools,
        tool_parser=optional_str(body, "tool_parser"),
        reasoning_parser=optional_str(body, "reasoning_parser"),
        prompt_ids=None if before is None else _parse_ids(before, "prompt_ids"),
    )


def parse_detokenize(body: Mapping[str, Any], vocab_size: int) -> tuple[Ids, bool]:
    """Return `tokens`, which are below `vocab_size`, and whether the text has special tokens. Raises InvalidRequest."""
    ids = _parse_ids(body.get("tokens"), "tokens")
    if max(ids, default=0) >= vocab_size:
        message = f"'tokens' has {max(ids)}, but the model's token ids end at {vocab_size - 1}"
        raise InvalidRequest(message, param="tokens")
    return ids, not optional_bool(body, "skip_special_tokens")


def tokenize_reply(ids: Ids, context_length: int) -> dict[str, Any]:
    """Return the reply of `/v1/tokenize`. `context_length`: the maximum number of tokens of a prompt and its output."""
    return {"count": len(ids), "max_model_len": context_length, "tokens": ids.tolist(), "token_strs": None}


def parse_reply(message: Message, finish: FinishReason) -> dict[str, Any]:
    """Return the reply of `/v1/parse`."""
    return {"message": message_json(message), "finish_reason": FINISH_REASONS[finish]}


def _parse_continued(fields: Mapping[str, Any], messages: Sequence[Message]) -> Continued:
    at = "continue_from."
    known = _required_int(fields, "messages", least=1, most=len(messages))
    answer, name = messages[known - 1], f"messages[{known - 1}]"
    if answer.role is not Role.ASSISTANT:
        raise InvalidRequest(
            f"'{at}messages' is {known}, so '{name}' must be the answer that 'token_ids' end with, but it is from the "
            f"{answer.role.value}; count the messages up to the last sampled answer",
            param=f"{at}messages",
        )
    ids = parse_token_ids(fields.get("token_ids"), f"{at}token_ids")
    sampled = _required_int(fields, "output_tokens", least=0, most=len(ids))
    if not sampled and (answer.content or answer.reasoning or answer.tool_calls):
        raise InvalidRequest(
            f"'{at}output_tokens' is 0, but '{name}' is not empty; give the number of ids at the end of 'token_ids' "
            "that were sampled as this answer",
            param=f"{at}output_tokens",
        )
    return Continued(known, ids, sampled)


def _required_int(fields: Mapping[str, Any], name: str, *, least: int, most: int) -> int:
    at = "continue_from."
    value = optional_int(fields, name, least=least, most=most, at=at)
    if value is None:
        raise InvalidRequest(f"'{at}{name}' is missing", param=at + name)
    return value


def _parse_ids(value: Any, name: str) -> Ids:
    """Parse a list of token ids, which may be empty."""
    return Ids("i") if value == [] else parse_token_ids(value, name)
