"""Seeded texts: words as in prose and random ones, the text of equal seeds is equal."""

from __future__ import annotations

import random
from itertools import product

_WORDS = (
    "the of and to in a is that for it was on are as with his they at be this from have or by one had not but what "
    "all were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know agent "
    "answer array branch build buffer cache change class column command commit compile context default directory "
    "driver error event example export failure feature file filter folder format function header import index input "
    "instance integer interface library limit line message method model module network number object option output "
    "package parameter parser password pattern process program prompt query reader record reference release remote "
    "repository request response result return reward runner sample schema script search server session setting "
    "source statement status storage string system table target template test token tool trace training tree update "
    "value variable version warning window worker writer"
)
COMMON = tuple(_WORDS.split())
_SYLLABLES = tuple(a + b for a, b in product(("b", "d", "f", "g", "k", "l", "m", "n", "r", "st", "tr"), "aeiou"))


class Words:
    """Two of three words are common; the third is random, so that no cache has the text."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def word(self) -> str:
        if self._random.random() < 2 / 3:
            return self._random.choice(COMMON)
        return "".join(self._random.choices(_SYLLABLES, k=self._random.randint(2, 4)))

    def text(self, words: int) -> str:
        return " ".join(self.word() for _ in range(words))
