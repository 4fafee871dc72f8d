"""Images in Chromium: at their place in the text, read when they are seen, opened whole, folded among the tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, Request, Route, expect

from tests.browser import servers
from tests.browser.image_episodes import BROWSING, HOSTILE_IMAGES, MANY, MANY_TURNS, encoded
from tests.browser.views import session, wait

if TYPE_CHECKING:
    from tests.browser.conftest import Opened

TIMES = "\u00d7"
IMAGES = re.compile(r"/rl/sessions/.*/images/[0-9a-f]{64}$")
PIXELS = "image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])"


def told(url: str, turn: int, include: str) -> Any:
    return httpx.get(f"{url}/rl/sessions/{BROWSING}/interactions/{turn}?include={include}").json()


def turn(opened: Opened, url: str, name: str, query: str) -> Page:
    page = opened(url + session(name, query))
    wait(page)
    return page


def frames(page: Page) -> Locator:
    """The thumbnails of the conversation, which open the whole picture."""
    return page.get_by_role("region", name="Conversation").get_by_role("button", name=re.compile("^Image"))


def asked(page: Page) -> list[Request]:
    """The requests for images, as they come."""
    found: list[Request] = []
    page.on("request", lambda request: found.append(request) if IMAGES.search(request.url) else None)
    return found


def test_images_stand_in_the_text_with_size_type_tokens_and_digest(url: str, opened: Opened) -> None:
    known = told(url, 0, "messages")["messages"][-1]["images"]
    page = turn(opened, url, BROWSING, "?turn=0")
    expect(frames(page)).to_have_count(2)
    said = []
    for image in known:
        detail = "low detail, " if image.get("detail") else ""
        tokens = f"{image['tokens']} tokens, {image['digest'][:12]}"
        said.append(f"Image 1,280 {TIMES} 800, PNG, .* kB, {detail}{tokens}")
    for frame, words in zip(frames(page).all(), said, strict=True):
        expect(frame.locator("img")).to_have_attribute("alt", re.compile(words))
        assert frame.locator("img").evaluate(PIXELS) == [1280, 800]
    text = page.locator(".turn-user").inner_text()
    assert re.search(r"The first:.*and the second:.*Which has more", text, re.S)
    tops = [
        page.get_by_text(words).bounding_box()["y"] for words in ("The first:", "and the second:", "Which has more")
    ]  # type: ignore[index]
    places = [frame.bounding_box()["y"] for frame in frames(page).all()]  # type: ignore[index]
    assert tops[0] < places[0] < tops[1] < places[1] < tops[2]


def test_a_result_shows_its_image(url: str, opened: Opened) -> None:
    page = turn(opened, url, BROWSING, "?turn=1")
    expect(page.locator(".turn-tool img.picture")).to_have_attribute("alt", re.compile(f"^Image 1,280 {TIMES} 800"))


def test_the_whole_picture_opens_and_closes_by_keyboard_and_is_saved_as_it_came(url: str, opened: Opened) -> None:
    page = turn(opened, url, BROWSING, "?turn=0")
    frames(page).first.locator("img").wait_for()
    frames(page).first.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="The whole picture")
    expect(dialog).to_be_visible()
    digest = told(url, 0, "messages")["messages"][-1]["images"][0]["digest"]
    expect(dialog).to_contain_text(digest)
    with page.expect_download() as waiting:
        dialog.get_by_role("button", name="Save").click()
    assert waiting.value.suggested_filename == f"{digest[:12]}.png"
    assert Path(waiting.value.path()).read_bytes() == encoded(1)
    fitting = dialog.locator("img").bounding_box()
    dialog.get_by_role("button", name="Full size").click()
    whole = dialog.locator("img").bounding_box()
    assert (
        fitting
        and whole
        and (round(whole["width"]), round(whole["height"])) == (1280, 800) != (round(fitting["width"]), 0)
    )
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(frames(page).first).to_be_focused()


def test_pictures_are_read_when_they_come_into_view_and_left_when_they_go(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/sessions")
    requests = asked(page)
    page.goto(url + session(MANY, f"?turn={MANY_TURNS - 1}"))
    wait(page)
    expect(page.locator(".turn img.picture")).to_have_count(1)
    assert len(requests) == 1
    page.locator(".turn-earlier > summary").click()
    expect(page.locator(".turn-earlier .picture-box")).to_have_count(20)  # of the last 40 messages
    page.locator(".turn-earlier .picture-box").first.scroll_into_view_if_needed()
    expect(page.locator(".turn-earlier img.picture").first).to_be_visible()
    assert page.locator(".turn img.picture").count() < 12
    assert len(requests) < 16


def test_what_cannot_be_read_is_said_and_can_be_tried_again(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/sessions")
    opened.watched.allow("Failed to load resource|net::ERR_FAILED")
    page.route(IMAGES, lambda route: route.abort())
    page.goto(url + session(BROWSING, "?turn=1"))
    failed = page.locator(".turn-tool .picture-failed")
    expect(failed).to_contain_text("The server cannot be reached.")
    page.unroute(IMAGES)
    failed.get_by_role("button", name="Try again").click()
    expect(page.locator(".turn-tool img.picture")).to_be_visible()


def test_a_thumbnail_has_the_same_name_before_its_bytes_come(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/sessions")
    held: list[Route] = []
    page.route(IMAGES, lambda route: held.append(route))  # playwright marks the function, so no bound method
    page.goto(url + session(BROWSING, "?turn=0"))
    expect(page.get_by_text("Loading\u2026")).to_have_count(2)
    expect(frames(page)).to_have_count(2)
    expect(frames(page).first).to_be_disabled()
    for route in held:
        route.continue_()
    expect(frames(page).locator("img.picture")).to_have_count(2)


LIES = [
    (
        {"content_type": "image/svg+xml", "body": "<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"},
        "something else than a picture",
    ),
    ({"content_type": "text/html", "body": "<script>alert(1)</script>"}, "something else than a picture"),
    ({"content_type": "image/png", "body": "<svg xmlns='http://www.w3.org/2000/svg'/>"}, "cannot show these bytes"),
    (
        {"status": 404, "content_type": "application/json", "body": '{"error": {"message": "there is no such image"}}'},
        "there is no such image",
    ),
]


@pytest.mark.parametrize(("lie", "words"), LIES, ids=["svg", "html", "svg as png", "gone"])
def test_only_pictures_of_four_types_are_shown_whatever_the_bytes_are(
    url: str, opened: Opened, lie: Any, words: str
) -> None:
    page = opened(f"{url}/#/sessions")
    opened.watched.allow("status of 404")

    def answer(route: Route) -> None:
        route.fulfill(**lie)

    page.route(IMAGES, answer)
    page.goto(url + session(BROWSING, "?turn=1"))
    expect(page.locator(".turn-tool .picture-failed")).to_contain_text(words)
    expect(page.locator(".turn-tool img.picture")).to_have_count(0)


def test_every_type_of_image_is_shown_from_bytes_at_their_worst(url: str, opened: Opened) -> None:
    page = turn(opened, url, HOSTILE_IMAGES, "?turn=0")
    expect(frames(page)).to_have_count(5)
    kinds = []
    for frame in frames(page).all():
        frame.scroll_into_view_if_needed()
        image = frame.locator("img")
        assert image.evaluate(PIXELS) == [320, 200]
        kinds.append((image.get_attribute("alt") or "").split(", ")[1])
        assert (image.get_attribute("src") or "").startswith("blob:")
    assert kinds == ["PNG", "PNG", "GIF", "JPEG", "WebP"]


def test_the_key_is_sent_as_a_header_and_stands_in_no_address(tmp_path: Path, opened: Opened) -> None:
    with servers.serving(servers.images_database(tmp_path), admin_key=servers.ADMIN_KEY) as url:
        page = opened(url)
        page.evaluate("key => sessionStorage.setItem('tokengrove-admin-key', key)", servers.ADMIN_KEY)
        requests = asked(page)
        page.goto(url + session(BROWSING, "?turn=0"))
        page.reload()
        opened.watched.allow("401")
        frames(page).first.locator("img").wait_for()
        headers = [request.headers for request in requests]
        assert {each["authorization"] for each in headers} == {f"Bearer {servers.ADMIN_KEY}"}
        assert servers.ADMIN_KEY not in page.content() + "".join(request.url for request in requests)
        page.context.close()


def test_a_fork_shows_the_image_of_both_sides(url: str, opened: Opened) -> None:
    for number, sides in ((3, [1, 1]), (4, [1, 1]), (5, [1, 0])):
        fork = turn(opened, url, BROWSING, f"?turn={number}").locator(".turn-fork")
        for side, count in zip(("recorded", "sent"), sides, strict=True):
            expect(fork.locator(f".turn-images-{side} img.picture")).to_have_count(count)


def test_the_tokens_of_an_image_are_one_cell_that_unfolds(url: str, opened: Opened) -> None:
    (*_, image) = told(url, 1, "tokens")["tokens"]["images"]
    start, end = image["start"], image["start"] + image["length"]
    page = turn(opened, url, BROWSING, f"?turn=1&show=tokens&at={start + 5}")
    cell = page.locator(f'[data-token="{start}"]')
    expect(cell).to_have_text(f"1280{TIMES}800 {image['length']} tokens")
    expect(cell.locator("img")).to_be_visible()
    assert cell.evaluate("cell => cell.scrollWidth <= cell.clientWidth")
    expect(page.locator(f'[data-token="{start + 1}"]')).to_have_count(0)
    cell.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(f'[data-token="{end}"]')).to_be_focused()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    expect(page.locator(f'[data-token="{start}"]')).to_be_focused()
    expect(page.locator(f'[data-token="{start + 1}"]')).to_be_visible()
    bar = page.get_by_role("region", name="The image of the chosen token")
    bar.get_by_role("button", name=re.compile("^Fold its")).click()
    expect(page.locator(f'[data-token="{start + 1}"]')).to_have_count(0)
    bar.get_by_role("button", name=re.compile("^Image")).click()
    expect(page.get_by_role("dialog", name="The whole picture")).to_be_visible()


@pytest.mark.parametrize("width", [360, 760])
def test_a_narrow_window_holds_the_pictures(url: str, opened: Opened, width: int) -> None:
    page = opened(url + session(BROWSING, "?turn=3"), viewport={"width": width, "height": 700})
    wait(page)
    for frame in page.locator(".turn button.picture-frame").all():
        frame.scroll_into_view_if_needed()
        box = frame.bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
