"""How long a JSON text takes to parse, found by counting."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest

from proxy.api import bodies
from proxy.api.bodies import CONTAINER, weigh, weighs_at_most

MUCH = 10**12


def counted(value: Any) -> int:
    """The weight by walking through the value."""
    if isinstance(value, dict):
        return CONTAINER * (1 + len(value)) + max(len(value) - 1, 0) + sum(map(counted, value.values()))
    if isinstance(value, list):
        return CONTAINER + max(len(value) - 1, 0) + sum(map(counted, value))
    return 0


def some(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(6 if depth < 5 else 4)
    if kind < 3:
        alphabet = '\\\\\\""",:[]{}ab\n\u00e9\u4e2d\U0001f642'
        return "".join(chance.choices(alphabet, k=chance.randrange(12)))
    if kind == 3:
        return chance.choice([1, -2.5, None, True, 10**15])
    size = chance.randrange(6)
    if kind == 4:
        return [some(chance, depth + 1) for _ in range(size)]
    return {f'k{number}\\"{chance.choice(",:[{")}': some(chance, depth + 1) for number in range(size)}


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 64, 2**18])
def test_only_marks_outside_of_strings_count_wherever_the_text_is_cut(
    cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_SLICE", cut)
    chance = random.Random(cut)
    for _ in range(60):
        value = some(chance)
        for text in (orjson.dumps(value), json.dumps(value, indent=1).encode()):
            assert weigh(text, MUCH) == counted(value) <= weighs_at_most(text)


def test_it_stops_early_once_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SLICE", 100)
    text = b"[" + b"[]," * 10_000 + b"[]]"
    assert 50 < weigh(text, 50) < 2000


@pytest.mark.parametrize("text", [b"", b"\\", b'"\\', b'"[[[', b"\\\\\\[", b"[[[", b'{"a":'])
def test_any_bytes_have_a_weight(text: bytes) -> None:
    assert weigh(text, MUCH) >= 0
