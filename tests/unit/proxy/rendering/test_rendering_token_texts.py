"""The text of each token: whole characters, whoever spells them, and no replacement characters."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from proxy.rendering.token_texts import Texts, TokenTexts
from proxy.rendering.tokenizer import sample_texts
from tests.support import tiny_renderer


def spelled(*pieces: bytes, special: Sequence[int] = ()) -> Texts:
    """The texts of tokens with these bytes, whose ids are their indexes."""
    return TokenTexts(pieces.__getitem__, special.__contains__).of(range(len(pieces)))


def test_the_first_token_of_a_character_has_it_and_the_others_continue_it() -> None:
    found = spelled(b"a", b"\xf0\x9f", b"\x99", b"\x82", b" b")
    assert (found.texts, found.continues, found.broken) == (["a", "🙂", "", "", " b"], [2, 3], [])


def test_a_token_may_end_one_character_and_begin_the_next() -> None:
    found = spelled(b"x\xc3", b"\xa9y\xe4", b"\xb8\xad!")
    assert (found.texts, found.continues, found.broken) == (["xé", "y中", "!"], [], [])


def test_bytes_that_are_no_text_are_written_as_bytes() -> None:
    cut = spelled(b"ok", b"\xf0\x9f")
    assert (cut.texts, cut.continues, cut.broken) == (["ok", "\\xF0\\x9F"], [], [1])
    stray = spelled(b"\xa9", b"\xe4\xb8", b"<end>", b"\xff")
    assert (stray.texts, stray.broken) == (["\\xA9", "\\xE4\\xB8", "<end>", "\\xFF"], [0, 1, 3])


def test_a_lone_surrogate_is_no_character() -> None:
    assert spelled(b"\xed\xa0\x80").texts == ["\\xED\\xA0\\x80"]


def test_an_id_outside_of_the_vocabulary_has_no_text_and_continues_nothing() -> None:
    found = spelled(b"a", b"", b"b")
    assert (found.texts, found.continues, found.broken) == (["a", "", "b"], [], [])


def test_leading_spaces_are_kept() -> None:
    assert spelled(b" the", b"  ", b"\n\t").texts == [" the", "  ", "\n\t"]


def test_special_tokens_are_named_by_id_once() -> None:
    assert spelled(b"<a>", b"b", b"<c>", special=[0, 2]).special == [0, 2]
    renderer = tiny_renderer()
    ids = renderer.encode("hi<|im_end|>\nyou<|im_end|>")
    found = TokenTexts(renderer.piece, renderer.is_special).of(ids)
    assert [renderer.decode([number]) for number in found.special] == ["<|im_end|>"]


def test_all_texts_together_are_the_text_of_the_sequence() -> None:
    renderer = tiny_renderer()
    texts = TokenTexts(renderer.piece, renderer.is_special)
    for text in sample_texts():
        ids = renderer.encode(text)
        found = texts.of(ids)
        assert "".join(found.texts) == renderer.decode(ids)
        assert (len(found.texts), found.broken) == (len(ids), [])


@given(st.text(), st.lists(st.integers(0, 12)))
def test_however_text_is_cut_its_characters_are_whole(text: str, cuts: Sequence[int]) -> None:
    data, pieces, at = text.encode(errors="ignore"), [], 0
    for length in cuts:
        pieces.append(data[at : at + length])
        at += length
    found = spelled(*pieces, data[at:])
    assert "".join(found.texts) == data.decode()
    assert not found.broken
    assert all(not found.texts[index] for index in found.continues)


@given(st.lists(st.binary(max_size=5)))
def test_any_bytes_have_a_text_for_each_token(pieces: list[bytes]) -> None:
    found = spelled(*pieces)
    assert len(found.texts) == len(pieces)
    assert not any("�" in text for text in found.texts if "�".encode() not in b"".join(pieces))
    assert all(bool(text) or index in found.continues or not pieces[index] for index, text in enumerate(found.texts))
