"""Images stand in a terminal as notes at their place in the text, whatever a client said of their place."""

from __future__ import annotations

from rich.console import Console

from tokengrove.terminal.image_notes import content_parts, content_with_images, image_note
from tokengrove.terminal.turn_view import message_view

DIGEST = "3f2a91c0" + "0" * 56


def image(at: int = 0, **more: object) -> dict[str, object]:
    return {"digest": DIGEST, "at": at, "width": 1280, "height": 800, **more}


def test_a_note_says_what_is_known_and_nothing_else() -> None:
    assert image_note(image(media_type="image/png", tokens=512)) == "[image 1280x800 png 3f2a91c0 512 tokens]"
    assert image_note(image(detail="low")) == "[image 1280x800 3f2a91c0 low]"
    assert image_note({"digest": DIGEST}) == "[image 3f2a91c0]"


def test_images_stand_at_their_places_in_order() -> None:
    message = {"content": "before🙂after", "images": [image(), image(7), image(7), image(12)]}
    note = image_note(image())
    assert content_with_images(message) == f"{note}before🙂{note}{note}after{note}"


def test_a_place_outside_of_the_text_or_before_another_image_loses_no_text() -> None:
    message = {"content": "text", "images": [image(3), image(1), image(99)]}
    assert "".join(text for text, is_note in content_parts(message) if not is_note) == "text"
    assert sum(is_note for _, is_note in content_parts(message)) == 3


def test_a_message_without_images_is_its_text() -> None:
    assert list(content_parts({"content": "text"})) == [("text", False)]
    assert list(content_parts({"content": "", "images": []})) == []
    assert list(content_parts({"content": None})) == []


def test_a_note_and_the_same_words_in_a_text_can_be_told_apart() -> None:
    words = image_note(image())
    console = Console(color_system="truecolor", force_terminal=True, width=200)
    with console.capture() as captured:
        for part in message_view({"role": "user", "content": words, "images": [image()]}, ""):
            console.print(part)
    line = captured.get().splitlines()[-1]
    assert line.count(words) == 2 and line.startswith("\x1b[") and line.endswith(words)
