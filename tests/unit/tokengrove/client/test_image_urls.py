"""Images of every form that datasets, tools and environments have, as the URLs of a request."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.vision import data_url, png
from tokengrove.client.image_urls import ImageUrls, image_url, images_of
from tokengrove.errors import InvalidRequest

Image = pytest.importorskip("PIL.Image")

PNG = png(20, 10)
URL = data_url(PNG)


def pixels(url: str) -> np.ndarray[Any, Any]:
    """The picture of a data URL, uint8 [height, width, 3]."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB"))


def opened(data: bytes = PNG) -> Any:
    return Image.open(io.BytesIO(data))


def test_what_was_encoded_is_sent_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    text = base64.b64encode(PNG).decode()
    given = [URL, PNG, bytearray(PNG), text, path, str(path), f"file://{path}", {"bytes": PNG, "path": "x.png"}]
    assert {image_url(each) for each in [*given, {"bytes": None, "path": str(path)}, {"bytes": URL}]} == {URL}
    assert image_url("https://example.org/a.png") == "https://example.org/a.png"


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_the_bytes_say_what_kind_of_image_they_are(kind: str) -> None:
    written = io.BytesIO()
    opened().save(written, kind)
    assert image_url(written.getvalue()).startswith(f"data:image/{kind.lower()};base64,")


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "CMYK", "F"])
def test_a_picture_becomes_a_png_that_loses_nothing(mode: str) -> None:
    picture = opened().convert("RGB").convert(mode)
    url = image_url(picture)
    assert url.startswith("data:image/png;")
    assert np.array_equal(pixels(url), np.asarray(picture.convert("RGB")))


def test_an_array_is_a_picture() -> None:
    array = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    assert np.array_equal(pixels(image_url(array)), array)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (object(), "not 'object'"),
        ({}, "not 'NoneType'"),
        (np.zeros((4, 4, 3)), r"not float64 \(4, 4, 3\)"),
        (np.zeros((4, 4), np.uint8), r"uint8 \(4, 4\)"),
        ("no/such.png", "No such file"),
        ("a\0b", "it is no path"),
    ],
)
def test_anything_else_is_refused_with_the_reason(image: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        image_url(image)


def test_a_picture_is_encoded_once_and_again_after_it_was_drawn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []
    monkeypatch.setattr("tokengrove.client.image_urls._png", lambda picture: encoded.append(picture) or PNG)
    urls, picture = ImageUrls(most=2), opened().convert("RGB")
    assert urls.urls([picture, picture.copy(), None]) == [URL, URL] and len(encoded) == 1
    picture.putpixel((0, 0), (1, 2, 3))
    urls.urls(picture)
    assert len(encoded) == 2
    urls.url(picture.resize((3, 3)))
    urls.url(opened().convert("RGB"))  # the first of three: forgotten
    assert len(encoded) == 4


def test_messages_get_their_images_in_the_form_of_a_chat_completion() -> None:
    text = {"type": "text", "text": "What is it?", "image": None}
    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "image", "image": PNG, "text": None}, text]},
        {"role": "tool", "content": [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}]},
        {"role": "user", "content": [{"type": "image", "url": URL, "detail": "low"}]},
    ]
    assert images_of(messages) == [PNG, "https://a/b.png", URL]
    made = ImageUrls().messages(messages)
    assert made[0] == messages[0] and made[2] == messages[2]
    assert made[1]["content"] == [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "text", "text": "What is it?"},
    ]
    assert made[3]["content"] == [{"type": "image_url", "image_url": {"url": URL, "detail": "low"}}]


def test_parts_without_an_image_take_those_of_the_list_in_order() -> None:
    second = image_url(png(8, 8, 1))
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]}]
    [made] = ImageUrls().messages(shown, [PNG, second])
    found = [part["image_url"]["url"] for part in made["content"] if part["type"] == "image_url"]
    assert found == [URL, second]
    for images in ([PNG], [PNG, PNG, PNG]):
        with pytest.raises(InvalidRequest, match=f"2 parts for {len(images)} images"):
            ImageUrls().messages(shown, images)
    with pytest.raises(InvalidRequest, match="0 parts for 1 images"):
        ImageUrls().messages([{"role": "user", "content": "x"}], [PNG])


def test_images_that_messages_have_already_are_not_counted_twice() -> None:
    """verl's loops give the images of the messages beside them."""
    shown = [{"role": "user", "content": [{"type": "image", "image": PNG}]}]
    assert ImageUrls().messages(shown, [SimpleNamespace()]) == ImageUrls().messages(shown)
