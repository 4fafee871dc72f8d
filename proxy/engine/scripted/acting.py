"""A script that behaves like a small, well-behaved model: it calls tools, reports results, writes JSON and text.

Deterministic: the output depends on the conversation alone, which is read back from a prompt of token ids
(`prompt_text`). The output has the format of the model family, so that parser, stream and store work as with a real
model. Text is never encoded as a marker token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.answers import formatted_answer, planned_calls, text_answer
from proxy.engine.scripted.instances import Mentions, instance
from proxy.engine.scripted.prompt_text import read_prompt
from proxy.engine.scripted.scripts import Reply, Script
from proxy.types import Api, Ids, Tool, ToolChoice, ToolChoiceMode, TurnRequest, ids_of
from tokengrove.errors import UnsupportedParameter

_MARKER_STARTS = re.compile(r"[<\[]|[^<\[]+")


class Speech(Protocol):
    """The part of a renderer that acting needs."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def reasoning(self) -> Any:
        """The markers around reasoning, as attributes `opener` and `closer`; None if the family has none."""

    def encode(self, text: str) -> Ids: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def tool_grammar(self, tools: Sequence[Tool], tool_choice: ToolChoice, parallel: bool) -> Grammar | None: ...


def act(speech: Speech, *, think: bool = False, chunk: int = 1, delay_s: float = 0.0) -> Script:
    """A script for `ScriptedEngine`. `think`: reason first, if the model family and the prompt allow it."""
    actor = _Actor(speech, think)

    def script(request: GenerateRequest) -> Reply:
        return Reply(actor.answer(request), chunk, delay_s)

    return script


class _Actor:
    """Writes the whole answer to a request."""

    def __init__(self, speech: Speech, think: bool) -> None:
        self._speech = speech
        self._think = think and speech.reasoning is not None

    def answer(self, request: GenerateRequest) -> Ids:
        """The ids of the answer, with the end token."""
        turn = self._asked(request)
        ids = self._thought(request) if self._think else ids_of()
        calls = planned_calls(turn)
        written = self._calls(turn, calls) if calls else None
        if written is None:
            written = self._plain(formatted_answer(turn) or text_answer(turn))
        return ids + written + ids_of(self._speech.stop_token_ids[:1])

    def _asked(self, request: GenerateRequest) -> TurnRequest:
        """The client's request; for a prompt of token ids, with the messages and tools that are read back from it."""
        turn = request.turn or TurnRequest(Api.GENERATE, "", (), input_ids=request.input_ids)
        if turn.input_ids is None:
            return turn
        messages, tools = read_prompt(self._speech.decode(request.input_ids.tolist()))
        return replace(turn, messages=messages, tools=tools)

    def _calls(self, turn: TurnRequest, calls: Sequence[tuple[Tool, Mentions]]) -> Ids | None:
        """The calls in the format of the model family; None if that format is unknown."""
        out = ids_of()
        for position, (tool, mentions) in enumerate(calls):
            try:
                choice = ToolChoice(ToolChoiceMode.NAMED, tool.name)
                grammar = self._speech.tool_grammar([tool], choice, turn.parallel_tool_calls)
            except UnsupportedParameter:
                return None
            if grammar is None or (position and not grammar.repeat):
                break
            if position:
                out += self._speech.encode(grammar.separator)
            for part in grammar.alternatives[0]:
                out += self._part(part, mentions)
        return out

    def _part(self, part: GrammarPart, mentions: Mentions) -> Ids:
        if part.schema is not None:
            return self._plain(json.dumps(instance(part.schema, mentions), ensure_ascii=False))
        return ids_of([part.token_id]) if part.token_id is not None else self._speech.encode(part.text)

    def _plain(self, text: str) -> Ids:
        """Encode `text` without marker tokens: all markers begin with `<` or `[`, which are encoded separately."""
        out = ids_of()
        for piece in _MARKER_STARTS.findall(text):
            out += self._speech.encode(piece)
        return out

    def _thought(self, request: GenerateRequest) -> Ids:
        markers, encode = self._speech.reasoning, self._speech.encode
        tail = request.prompt.tail(8)
        opener, closer = encode(markers.opener), encode(markers.closer)
        turn = request.turn
        off = turn is not None and (turn.prefill is not None or turn.template_options.get("enable_thinking") is False)
        if off or closer[-1] in tail:
            return ids_of()
        begin = ids_of() if opener[-1] in tail else opener + encode("\n")
        return begin + self._plain("The user wants an answer. I will give a short one.\n") + closer + encode("\n\n")
