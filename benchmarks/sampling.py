"""What the engine samples: ids that no tokenizer would give for their text.

Every answer has a number of tokens that was asked for. It begins with a tag that is its own, ends with the end token of
the chat template, and has words that are split where BPE would merge them. A call of a tool has spaces in its JSON that
a template does not write. So a gateway that encodes the text of an answer again gets other ids, always.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.model import CALL, CALL_END, END, Model
from benchmarks.texts import COMMON, Words

SHORTEST, SHORTEST_CALL = 32, 80
_SPLIT_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Answer:
    """`text`: of all ids but the end token. `content`: the same without the call. `call`: name and query, or None."""

    ids: list[int]
    text: str
    content: str
    call: tuple[str, str] | None


class Sampler:
    """Samples answers of a model. Equal tags give equal answers."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._end = model.id_of(END)
        vocabulary = model.tokenizer.get_vocab()
        self.split: list[list[int]] = []
        self.plain: list[int] = []
        for word in COMMON:
            ids = model.encode(" " + word)
            if len(ids) == 1:
                self.plain.append(ids[0])
                if (halves := _halves(word, vocabulary)) is not None and model.encode(" " + word) != halves:
                    self.split.append(halves)
        if not self.plain or not self.split:
            raise ValueError("the tokenizer has no word of the load as one token and as two; use a larger vocabulary")

    def answer(self, tag: str, tokens: int, tool: str | None) -> Answer:
        """Return an answer of `tokens` tokens. Raises ValueError if they are too few for the tag and the call."""
        random_ = random.Random(tag)
        head = self._model.encode(f"#{tag}")
        call = tail = None
        if tool is not None:
            call = (tool, Words(tag).text(4))
            tail = self._model.encode(
                f'\n{CALL}\n{{"name":  "{tool}","arguments":{{ "query" : "{call[1]}" }}}}\n{CALL_END}'
            )
        room = tokens - len(head) - len(tail or []) - 1
        if room < 2:
            raise ValueError(f"an answer needs at least {tokens - room + 2} tokens, not {tokens}")
        words: list[int] = [*random_.choice(self.split)]
        while len(words) < room:
            if room - len(words) >= 2 and random_.random() < _SPLIT_SHARE:
                words += random_.choice(self.split)
            else:
                words.append(random_.choice(self.plain))
        content = [*head, *words]
        ids = [*content, *(tail or [])]
        return Answer([*ids, self._end], self._model.decode(ids), self._model.decode(content), call)

    def probe(self, tokens: int) -> Answer:
        """Return an answer of any length, to a request that is not of the load."""
        ids = [*(self.plain[place % len(self.plain)] for place in range(tokens - 1)), self._end]
        text = self._model.decode(ids[:-1])
        return Answer(ids, text, text, None)


def _halves(word: str, vocabulary: dict[str, int]) -> list[int] | None:
    """Return two tokens that together are a space and the word. Byte-level BPE writes a space as `Ġ`."""
    spaced = "Ġ" + word
    for cut in range(len(spaced) // 2 + 1, 1, -1):
        first, second = vocabulary.get(spaced[:cut]), vocabulary.get(spaced[cut:])
        if first is not None and second is not None:
            return [first, second]
    return None
