"""What the intake of images keeps, shares and bounds; the rest is tested through the APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from proxy.images import intake
from proxy.images.data_urls import decode_text
from proxy.images.decode import digest_of
from proxy.images.intake import ImageIntake, Limits, NoSession
from proxy.types import ImagePart
from tests.vision import data_url, png
from tokengrove.errors import InvalidRequest

pytest.importorskip("PIL")
ONE, TWO = png(seed=1), png(seed=2)
A, B = "https://pictures.test/a.png", "https://pictures.test/b.png"


class Field:
    """A source whose image is looked at by the test."""

    def __init__(self, text: str, name: str = "image") -> None:
        self.text, self.name = text, name
        self.image: ImagePart | None = None

    def put(self, image: ImagePart) -> None:
        self.image = image


class Host:
    """Answers URLs, and counts what was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, url: str, name: str) -> bytes:
        self.asked.append(url)
        await asyncio.sleep(0)
        return {A: ONE, B: TWO}[url]


async def work(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def taking(host: Host | None = None, **limits: int) -> ImageIntake:
    most = {"pixels": 10**6, "bytes": 10**6, "images": 8, "fetched": 10**6, **limits}
    return ImageIntake(Limits(**most), lambda: "", host)


@pytest.mark.parametrize(("limit", "most"), [("bytes", len(ONE)), ("pixels", 0)])
async def test_an_image_may_have_exactly_as_much_as_its_limit(limit: str, most: int) -> None:
    field = Field(data_url(ONE))
    await taking().take([field], NoSession(), work)
    assert field.image is not None
    most = most or field.image.width * field.image.height
    await taking(**{limit: most}).take([Field(data_url(ONE))], NoSession(), work)
    with pytest.raises(InvalidRequest, match=f"at most {most - 1} .*allowed"):
        await taking(**{limit: most - 1}).take([Field(data_url(ONE))], NoSession(), work)


def test_a_text_that_is_too_long_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(InvalidRequest, match="at most 3 are allowed"):
        decode_text("*" * 400, "image", 3)


async def test_the_images_that_a_request_fetches_are_bounded_together() -> None:
    both = len(ONE) + len(TWO)
    files = await taking(Host(), fetched=both).take([Field(A), Field(B)], NoSession(), work)
    assert {*files} == {digest_of(ONE), digest_of(TWO)}
    with pytest.raises(InvalidRequest, match=f"more than {both - 1} bytes") as refused:
        await taking(Host(), fetched=both - 1).take([Field(A, "first"), Field(B, "second")], NoSession(), work)
    assert refused.value.param == "second"


async def test_sessions_that_fetch_one_url_at_once_each_remember_their_image() -> None:
    host, holders = Host(), [NoSession(), NoSession()]
    images = taking(host)
    await asyncio.gather(*(images.take([Field(A)], holder, work) for holder in holders))
    assert [holder.image_urls for holder in holders] == [{A: digest_of(ONE)}] * 2
    assert host.asked == [A, A]


async def test_a_fetched_image_has_the_size_of_the_same_image_in_a_data_url() -> None:
    fetched, sent = Field(A), Field(data_url(ONE))
    await taking(Host()).take([fetched, sent], NoSession(), work)
    assert fetched.image == sent.image
    assert fetched.image is not None and fetched.image.width != fetched.image.height


async def test_fetched_images_wait_for_their_turn_only_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_MOST_FETCHED", len(ONE) + len(TWO) - 1)
    host, holder = Host(), NoSession()
    images = taking(host)
    for url in (A, A, B, B, A):
        await images.take([Field(url)], holder, work)
    assert host.asked == [A, B, A]


async def test_texts_that_were_seen_longest_ago_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_MOST_KNOWN", 1)
    read: list[str] = []

    async def noting(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
        read.append(arguments[1])
        return function(*arguments)

    images, holder = taking(), NoSession()
    for data, name in ((ONE, "first"), (ONE, "again"), (TWO, "other"), (ONE, "later")):
        await images.take([Field(data_url(data), name)], holder, noting, sizes_only=True)
    assert read == ["first", "other", "later"]
