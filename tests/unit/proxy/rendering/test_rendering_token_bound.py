"""A bound of the tokens of a text is never above their number, and near it for what fills a context."""

from __future__ import annotations

import base64
import random
import string
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rendering_tokenizer import quick
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers

from proxy.rendering import Renderer, token_bound, tokenizer
from proxy.rendering.token_bound import TokenBound, TooManyTokens, at_most
from proxy.rendering.tokenizer import Tokenizer, sample_texts
from tests.wide import few, first

MUCH = 10**12


def bound_of(renderer: Renderer) -> TokenBound:
    bound = renderer._tokenizer._bound
    assert bound is not None
    return bound


@cache
def large_texts() -> dict[str, str]:
    chance = random.Random(5)
    return {
        "prose": " ".join(chance.choices(Path(__file__).read_text(encoding="utf-8").split(), k=20_000)),
        "code": Path(__file__).read_text(encoding="utf-8") * 20,
        "one letter": "a" * 100_000,
        "two letters": "ab" * 50_000,
        "random letters": "".join(chance.choices(string.ascii_lowercase, k=100_000)),
        "random characters": "".join(chance.choices(string.printable, k=100_000)),
        "base64": base64.b64encode(chance.randbytes(75_000)).decode(),
        "spaces": " " * 100_000,
        "lines": "\n" * 100_000,
        "digits": "".join(chance.choices(string.digits, k=100_000)),
        "rule": "-" * 100_000,
        "chinese": "".join(chr(chance.randrange(0x4E00, 0x9FA5)) for _ in range(30_000)),
        "emoji": "\U0001f642" * 30_000,
        "decomposed": "Zu\u0308rich e\u0301te\u0301 \u1112\u1161\u11ab " * 5_000,
        "marks": "<|im_start|>user\nhi<|im_end|>\n" * 4_000,
        "json": '{"a": [1, 2, {"b": "text"}], "c": null}, ' * 3_000,
        "samples": "".join(sample_texts()) * 10,
    }


@quick
@given(parts=st.lists(st.one_of(st.text(max_size=30), st.sampled_from(sample_texts())), max_size=6))
def test_it_is_never_above_the_number_of_tokens(tiny: Renderer, qwen3: Renderer, parts: list[str]) -> None:
    text = "".join(parts).encode("utf-8", "ignore").decode()
    for renderer in (tiny, qwen3):
        assert bound_of(renderer).fewest(text, MUCH) <= len(renderer.encode(text))


@pytest.mark.parametrize("cut", few([1, 2, 3, 7, 50, 1000], (3, 1000)))
def test_it_is_never_above_the_number_of_tokens_wherever_the_text_is_cut(
    cut: int, tiny: Renderer, qwen3: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_bound, "_SLICE", cut)
    for renderer in (tiny, qwen3):
        for text in large_texts().values():
            text = text[:1500]
            assert bound_of(renderer).fewest(text, MUCH) <= len(renderer.encode(text))


@pytest.mark.parametrize("kind", first(large_texts(), 5))
def test_it_is_near_the_number_of_tokens_of_large_texts(kind: str, qwen3: Renderer) -> None:
    text = large_texts()[kind]
    tokens = len(qwen3.encode(text))
    assert tokens * 0.3 <= bound_of(qwen3).fewest(text, MUCH) <= tokens


def test_it_stops_once_it_has_enough(qwen3: Renderer) -> None:
    assert 100 < bound_of(qwen3).fewest("many words " * 10**6, 100) < 20_000


def test_a_long_text_that_surely_has_too_many_tokens_is_not_encoded(
    qwen3: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, encoded = "many words " * 40_000, list[int]()
    encode = qwen3._tokenizer._encode

    def watched(text: str) -> Any:
        encoded.append(len(text))
        return encode(text)

    monkeypatch.setattr(qwen3._tokenizer, "_encode", watched)
    with at_most(50_000), pytest.raises(TooManyTokens) as refused:
        qwen3.encode(text)
    assert 50_000 < refused.value.fewest <= 80_001
    assert encoded == []
    with at_most(100_000):
        ids = qwen3.encode(text)
    assert encoded == [len(text)]
    assert ids == qwen3.encode(text)  # outside of the block nothing is refused


def test_a_short_text_is_encoded_without_asking(qwen3: Renderer) -> None:
    with at_most(10):
        assert len(qwen3.encode("many words " * 100)) > 10


@pytest.mark.parametrize(
    ("normalizer", "form"),
    [
        (None, ""),
        (normalizers.NFC(), "NFC"),
        (normalizers.Sequence([]), ""),
        (normalizers.NFKC(), None),
        (normalizers.Lowercase(), None),
        (normalizers.Sequence([normalizers.Strip()]), None),
    ],
    ids=str,
)
def test_only_texts_that_keep_their_bytes_have_a_bound(normalizer: Any, form: str | None) -> None:
    backend = Backend(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    assert tokenizer._normal_form(backend) == form


def test_a_vocabulary_whose_markers_swallow_white_space_has_no_bound(tiny_folder: Path) -> None:
    made = Tokenizer.load(tiny_folder)
    assert made._bound is not None
    backend = Backend.from_file(str(tiny_folder / "tokenizer.json"))
    backend.add_special_tokens([tokenizer_token("<swallow>")])
    assert tokenizer._normal_form(backend) is None


def tokenizer_token(content: str) -> Any:
    from tokenizers import AddedToken

    return AddedToken(content, rstrip=True)
