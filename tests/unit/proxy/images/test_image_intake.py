"""What the intake remembers of fetched images: each session its own URLs, and no more of them than its bound."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proxy.images import intake
from proxy.images.intake import ImageIntake, Limits, NoSession
from proxy.protocols.image_sources import Source
from tests.vision import png
from tokengrove.errors import InvalidRequest

LIMITS = Limits(pixels=10**6, bytes=10**6, images=100, fetched=10**6)
Fetch = Callable[[str, str], Awaitable[bytes]]


async def work(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def taking(fetch: Fetch) -> ImageIntake:
    return ImageIntake(LIMITS, lambda: "", fetch)


async def take(images: ImageIntake, url: str, holder: NoSession) -> Any:
    return await images.take([Source({}, "image_url", url, "messages[0]")], holder, work)


async def test_a_session_is_told_its_own_url_of_an_image_that_others_fetched_elsewhere() -> None:
    async def fetch(url: str, name: str) -> bytes:
        return png(seed=1)

    images, ours = taking(fetch), NoSession()
    await take(images, "https://ours.test/a.png", ours)
    await take(images, "https://theirs.test/a.png?signature=secret", NoSession())
    [file] = (await take(images, "https://ours.test/a.png", ours)).values()
    assert file.url == "https://ours.test/a.png"


async def test_a_session_remembers_a_bounded_number_of_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_MOST_URLS", 3)

    async def fetch(url: str, name: str) -> bytes:
        return png(seed=1)

    images, session = taking(fetch), NoSession()
    for number in range(5):
        await take(images, f"https://host.test/{number}", session)
    assert list(session.image_urls) == [f"https://host.test/{number}" for number in (2, 3, 4)]


async def test_a_fetch_that_fails_when_nobody_waits_any_more_is_not_reported_as_lost() -> None:
    began, go = asyncio.Event(), asyncio.Event()
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    async def fetch(url: str, name: str) -> bytes:
        began.set()
        await go.wait()
        raise InvalidRequest("gone")

    images = taking(fetch)
    asking = asyncio.create_task(take(images, "https://host.test/a", NoSession()))
    await began.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    [fetching] = images._fetching.values()
    go.set()
    await asyncio.wait([fetching])
    del fetching, asking
    gc.collect()
    assert not reported and not images._fetching
