"""Writes an answer as the model itself would: the ids that follow a generation prompt, in the format of the family.

The chat template writes the answer into a conversation. The output is the text that it adds to the generation prompt,
up to the end of the turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.rendering.renderer import Renderer
from proxy.types import Ids, Message, Role, Tool, ToolCall, TurnRequest, ids_of
from tokengrove.errors import InvalidRequest

_ASK = Message(Role.USER, "Synthesized question")


def write_answer(
    renderer: Renderer,
    history: Sequence[Message],
    answer: Message,
    tools: Sequence[Tool],
    options: Mapping[str, Any],
    following: Sequence[Message] = (),
) -> Ids:
    """Return `answer` as the model would sample it after the prompt of `history`, with an end token.

    `following`: messages that may follow. A family that ends turns by opening the next turn takes its end token from
    them. Raises InvalidRequest for what the template cannot express.
    """
    prompt = renderer.render(history, tools, options)
    written = renderer.render([*history, answer], tools, options, prompt=False)
    common = next((at for at, (a, b) in enumerate(zip(prompt, written, strict=False)) if a != b), len(prompt))
    body = written[common:]
    ends = [at for at, token in enumerate(body) if token in renderer.stop_token_ids]
    # The first stop token ends the answer: the template's text after it is layout.
    body = body[: ends[0]] if ends else body
    end = written[common + ends[0]] if ends else _opener(renderer, [*history, answer], tools, options, following)
    if common < len(prompt):
        body = renderer.encode(_after_prefill(renderer, answer, renderer.decode(body)))
    return body + ids_of([end])


def write_delivered(renderer: Renderer, request: TurnRequest, prompt: Ids, answer: Message) -> Ids:
    """Return an externally written answer to `request`, as the model would sample it, with an end token.

    `prompt`: the prompt of the request, or its last `bridge.TAIL` ids. After a prefill, `answer` is the rest. The ids
    are parsed like those of any turn. Raises InvalidRequest (param message) unless the result has the same text,
    reasoning and calls.
    """
    try:
        ids = _written(renderer, request, answer)
    except InvalidRequest as error:
        raise InvalidRequest(f"'message' cannot be written for this model: {error.message}", param="message") from None
    found, wanted = _read_back(renderer, request, prompt, ids), _said(answer)
    if found != wanted and not answer.tool_calls and not answer.reasoning:
        # Templates drop parts of a text that look like reasoning. Sampled tokens can be such a text.
        plain = renderer.encode(answer.content) + ids_of(renderer.stop_token_ids[:1])
        if _read_back(renderer, request, prompt, plain) == wanted:
            return plain
    if found != wanted:
        name = next(name for name in wanted if found[name] != wanted[name])
        known = ", ".join(tool.name for tool in request.tools) or "none"
        raise InvalidRequest(
            f"'message' cannot be written for this model: it becomes {renderer.decode(ids)!r}, whose {name} would be "
            f"read as {found[name]!r} (tools of the request: {known}); deliver 'text' or 'output_ids' instead",
            param="message",
        )
    return ids


def _written(renderer: Renderer, request: TurnRequest, answer: Message) -> Ids:
    if request.prefill is not None:  # the template would begin a new answer instead of continuing this one
        return renderer.encode(answer.content) + ids_of(renderer.stop_token_ids[:1])
    return write_answer(renderer, (_ASK,), answer, request.tools, request.template_options)


def _read_back(renderer: Renderer, request: TurnRequest, prompt: Ids, ids: Ids) -> dict[str, Any]:
    parser = renderer.reading(request.tool_parser).parser(request.tools, request.tool_choice, prompt)
    parser.feed(ids)
    parser.finish()
    return _said(parser.message)


def _said(answer: Message) -> dict[str, Any]:
    calls = [(call.name, _arguments(call)) for call in answer.tool_calls]
    reasoning = (answer.reasoning or "").strip()
    return {"tool_calls": calls, "reasoning_content": reasoning, "content": answer.content.strip()}


def _arguments(call: ToolCall) -> Any:
    try:
        return json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments


def _opener(
    renderer: Renderer,
    answered: Sequence[Message],
    tools: Sequence[Tool],
    options: Mapping[str, Any],
    following: Sequence[Message],
) -> int:
    """Return the end token of a family that ends turns by opening the next turn."""
    *history, answer = answered
    plain = [*history, answer._replace(reasoning=None)]
    written = renderer.render(plain, tools, options, prompt=False)
    whole = renderer.render([*plain, *following], tools, options) if following else written
    opener = whole[len(written) : len(written) + 1]
    return opener[0] if opener and opener[0] in renderer.stop_token_ids else renderer.stop_token_ids[0]


def _after_prefill(renderer: Renderer, answer: Message, text: str) -> str:
    """Return the answer after a generation prompt that history does not repeat, such as one that opens reasoning."""
    reasoning = renderer.reasoning
    if reasoning is None:
        return text
    shown = text.rpartition(reasoning.closer)[2] if reasoning.closer in text else text
    return f"{answer.reasoning or ''}\n{reasoning.closer}\n\n{shown.lstrip()}"
