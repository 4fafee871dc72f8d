"""The beginning of an answer that the client wrote (prefill): the prompt ends with it, and the model continues it.

A chat template may write another head before an answer in history than in the generation prompt: closed reasoning where
the generation prompt opens it, or a channel. The difference is found with a short synthetic conversation, so it depends
neither on the length of the history nor on the text of the prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.rendering.reasoning_formats import ReasoningFormat
from proxy.rendering.templates.chat_template import Options, Template
from proxy.rendering.tokenizer import Tokenizer
from proxy.types import Ids, Message, Role, Tool
from tokengrove.errors import InvalidRequest

_QUESTION = Message(Role.USER, "Synthesized question")
_ANSWER = "Synthesized answer"
_TOOL = Tool("synthesized", "", {})
# The maximum number of kept heads: their keys contain template options, which clients choose.
_KEPT = 64

_Head = tuple[Ids, str]
"""The end of a generation prompt that the head of an answer in history lacks, and what the head has instead."""


class Prefills:
    """Adds prefills to prompts of one template. `reasoning_open`: whether a prompt ends inside reasoning."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        reasoning: ReasoningFormat | None,
        reasoning_open: Callable[[Ids], bool],
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._closer = f"{reasoning.closer}\n\n" if reasoning is not None else ""
        self._reasoning_open = reasoning_open
        self._heads: dict[object, _Head | None] = {}

    def added(self, prompt_ids: Ids, prefill: Message, tools: Sequence[Tool], options: Options) -> Ids:
        """Return `prompt_ids` with the generation prompt at their end replaced by the head and text of an answer."""
        head = self._head(prefill.reasoning, tools, options)
        before = len(prompt_ids) - (0 if head is None else len(head[0]))
        if head is None or before < 0 or prompt_ids[before:] != head[0]:
            before, lead = len(prompt_ids), self._closer if self._reasoning_open(prompt_ids) else ""
        else:
            lead = head[1]
        return prompt_ids[:before] + self._tokenizer.encode(lead + prefill.content)

    def _head(self, reasoning: str | None, tools: Sequence[Tool], options: Options) -> _Head | None:
        if reasoning is not None:
            return self._find_head(reasoning, tools, options)
        kind = (bool(tools), repr(options))
        if kind not in self._heads:
            if len(self._heads) >= _KEPT:
                self._heads.clear()
            self._heads[kind] = self._find_head(None, tools, options)
        return self._heads[kind]

    def _find_head(self, reasoning: str | None, tools: Sequence[Tool], options: Options) -> _Head | None:
        """Compare the two heads. None if the template writes no answer in history."""
        shown = (_TOOL,) if tools else ()
        answer = Message(Role.ASSISTANT, _ANSWER, reasoning=reasoning)
        try:
            asked = self._template.render([_QUESTION], shown, options)
            answered = self._template.render([_QUESTION, answer], shown, options, prompt=False)
        except InvalidRequest:
            return None
        pairs = zip(asked, answered, strict=False)
        same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(asked))
        lead, found, _ = b"".join(map(self._tokenizer.piece, answered[same:])).rpartition(_ANSWER.encode())
        return (asked[same:], lead.decode(errors="replace")) if found else None
