"""The tokenizer gives the ids of Hugging Face's, joined pieces equal its decoding, and any thread may use it."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from proxy.rendering import Renderer
from proxy.rendering.detokenizer import WindowDetokenizer
from proxy.rendering.tokenizer import Tokenizer, sample_texts
from tokengrove.errors import ConfigurationError

quick = settings(max_examples=150)
markers = st.sampled_from(["<|im_start|>", "<|im_end|>", "<tool_call>", "<think>", "<|endoftext|>"])


@pytest.fixture(scope="session")
def hugging_face(tiny_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_folder)


@quick
@given(parts=st.lists(st.one_of(st.text(max_size=20), markers), max_size=6))
def test_ids_and_text_are_those_of_hugging_face(tiny: Renderer, hugging_face: Any, parts: list[str]) -> None:
    text = "".join(parts).encode("utf-8", "ignore").decode()
    expected = hugging_face(text, add_special_tokens=False)["input_ids"]
    assert tiny.encode(text).tolist() == expected
    assert tiny.decode(expected) == hugging_face.decode(expected)
    assert tiny.decode(expected, special=False) == hugging_face.decode(expected, skip_special_tokens=True)


@pytest.mark.wide
def test_the_fast_encoder_is_used_for_the_real_vocabulary(qwen3: Renderer) -> None:
    assert qwen3.encoder.startswith("fastokens")


@quick
@given(ids=st.lists(st.integers(0, 700), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_pieces_joined_are_the_decoding(tiny: Renderer, ids: list[int], cuts: list[int]) -> None:
    detokenizer = tiny._tokenizer.detokenizer()
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    text = "".join(detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(edges))
    assert text + detokenizer.flush() == tiny.decode(ids)


@quick
@given(text=st.text(max_size=60), size=st.integers(1, 40))
def test_a_window_decoder_gives_the_same_text(tiny: Renderer, text: str, size: int) -> None:
    text = text.encode("utf-8", "ignore").decode()
    detokenizer = WindowDetokenizer(tiny.decode)
    ids = tiny.encode(text)
    pieces = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join([*pieces, detokenizer.flush()]) == tiny.decode(ids)


@quick
@given(
    parts=st.lists(st.sampled_from(["🙂é日本x".encode(), "é".encode(), " a", "b"]), max_size=40),
    size=st.integers(1, 99),
)
def test_a_window_decoder_reads_characters_that_are_spelled_in_bytes(parts: list[bytes | str], size: int) -> None:
    """The decoder of SentencePiece vocabularies: a run of bytes that does not begin with a character has no text."""
    vocabulary = [(f"<0x{byte:02X}>", 0.0) for byte in range(256)] + [("\u2581a", -1.0), ("b", -1.0)]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, 0, byte_fallback=True))
    steps = tokenizers.decoders
    model.decoder = steps.Sequence([steps.Replace("\u2581", " "), steps.ByteFallback(), steps.Fuse()])
    ids = [token for part in parts for token in (part if isinstance(part, bytes) else [256 + (part == "b")])]
    detokenizer = WindowDetokenizer(lambda some: model.decode(list(some), skip_special_tokens=False))
    pieces = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    text = "".join(part.decode() if isinstance(part, bytes) else part for part in parts)
    assert "".join([*pieces, detokenizer.flush()]) == text


def test_ids_beyond_the_vocabulary_have_no_text(tiny: Renderer) -> None:
    assert tiny.vocab_size == 640
    assert tiny.decode([10**6]) == ""
    assert tiny._tokenizer.piece(10**6) == b""


def test_threads_encode_alike(tiny: Renderer) -> None:
    texts = sample_texts() * 10
    expected = [tiny.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tiny.encode, texts)) == expected


@pytest.mark.parametrize("content", [None, "{broken"])
def test_a_folder_without_a_tokenizer_gives_a_one_line_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a folder"):
        Tokenizer.load(tmp_path / "nowhere")
