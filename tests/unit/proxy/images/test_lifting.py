"""JSON without its images decodes to the same values, and each image is found by its mark."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.images.lifting import LEAST, Lifted

LONG = "A" * LEAST
URL = f"data:image/png;base64,{LONG}"


def restored(value: Any, lifted: Lifted) -> Any:
    """A decoded value with the strings that were lifted."""
    if isinstance(value, dict):
        return {name: restored(item, lifted) for name, item in value.items()}
    if isinstance(value, list):
        return [restored(item, lifted) for item in value]
    found = lifted.at(value) if isinstance(value, str) else None
    return value if found is None else str(found, "utf-8")


def test_images_are_lifted_and_everything_else_stays() -> None:
    value = {"a": [URL, {"data": "/9j/" + LONG}, "iVBORw0KGgo" + LONG, "R0lGOD" + LONG, "UklGR" + LONG], "b": LONG}
    for body in (orjson.dumps(value), json.dumps(value, indent=2).encode()):
        lifted = Lifted(body)
        assert len(lifted) == 5
        assert len(lifted.json) < 2 * LEAST
        assert restored(orjson.loads(lifted.json), lifted) == value


@pytest.mark.parametrize(
    "text", ["data:image/png;base64,short", URL + '"', URL + "\\", "see " + URL, f'he said "{URL}" then']
)
def test_short_texts_and_texts_with_escapes_are_not_lifted(text: str) -> None:
    body = orjson.dumps([text])
    assert len(Lifted(body)) == 0
    assert Lifted(body).json is body


def test_no_text_of_a_client_is_a_mark() -> None:
    seen = orjson.loads(Lifted(orjson.dumps([URL])).json)[0]
    lifted = Lifted(orjson.dumps([URL, seen]))
    assert [lifted.at(text) is None for text in orjson.loads(lifted.json)] == [False, True]


@pytest.mark.parametrize("body", [f'["x"{URL}"]', f'["{URL}]', f'["{URL}""]', f"[{URL}]", f'["{URL}" "{URL}"]'])
def test_what_is_no_json_stays_none(body: str) -> None:
    for text in (body.encode(), body.encode() + b" "):
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(text)
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(Lifted(text).json)


PIECES = st.sampled_from([URL, "/9j/" + LONG, '"', "\\", '"' + URL, '\\"' + URL, "x", "", "é", '","', URL + "\n"])
TEXTS = st.lists(PIECES, max_size=4).map("".join)
VALUES = st.recursive(
    TEXTS | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.booleans())
def test_any_json_is_the_same_with_its_images_put_back(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    lifted = Lifted(body)
    plain = orjson.loads(lifted.json)
    assert put_back(plain, lifted) == value


def put_back(value: Any, lifted: Lifted) -> Any:
    """As `restored`, for keys too."""
    if isinstance(value, dict):
        return {restored(name, lifted): put_back(item, lifted) for name, item in value.items()}
    return [put_back(item, lifted) for item in value] if isinstance(value, list) else restored(value, lifted)


def test_lifting_takes_what_base64_of_images_begins_with() -> None:
    for head in (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF"):
        assert len(Lifted(orjson.dumps([b64encode(head + bytes(LEAST)).decode()]))) == 1
