"""Images by URL: fetched only where that is allowed, once for a session, and never from inside the server's network."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.images.fetch import MOST_AT_ONCE, ImageFetcher, is_public
from proxy.rendering.renderer import Renderer
from tests.support import Server, assistant, says, serving, until, user
from tests.vision import png

ONE, TWO = png(seed=5), png(seed=6)
ALLOWED = {"allow_image_urls": True, "image_hosts": "pictures.test,127.0.0.1"}


class Host:
    """A web server: its answers by path, as bytes of HTTP, and what it was asked. `slow`: it never answers."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.slow, self.port = False, 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.asked.append(head)
            if self.slow:
                await reader.read()
            else:
                writer.write(self.answers.get(head.split()[1], b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n"))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def serve(self, path: str, data: bytes, **headers: str) -> str:
        fields = {"content-length": str(len(data)), "connection": "close", **headers}
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
        self.answers[path] = f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + data
        return f"http://pictures.test:{self.port}{path}"

    def redirect(self, path: str, to: str) -> str:
        self.answers[path] = f"HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n".encode()
        return f"http://pictures.test:{self.port}{path}"


@pytest.fixture
async def host(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    """A host that is called pictures.test, and by other names that end in .test."""
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def resolve(name: Any, port: Any, **more: Any) -> Any:
        if str(name).endswith(".test"):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        return await real(name, port, **more)

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    found = Host()
    listening = await asyncio.start_server(found.answer, "127.0.0.1", 0)
    found.port = listening.sockets[0].getsockname()[1]
    async with listening:
        yield found


@asynccontextmanager
async def allowed(folder: Path, renderer: Renderer, **settings: Any) -> AsyncIterator[Server]:
    async with serving(folder, says(*["fine"] * 8), renderer, **{**ALLOWED, **settings}) as server:
        yield server


async def send(server: Server, url: str, session: str = "s") -> Any:
    part = {"type": "image_url", "image_url": {"url": url}}
    return await server.post(f"/{session}/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})


async def message_of(server: Server, url: str) -> str:
    answer = await send(server, url)
    assert answer.status_code == 400, answer.text
    said: str = answer.json()["error"]["message"]
    assert said.startswith("'messages[0].content[0].image_url.url' ")
    return said


async def engine_images(server: Server) -> list[bytes]:
    images = server.engine.requests[-1].images
    assert images is not None
    return [file.data for file in await images.read()]


async def test_urls_are_refused_unless_the_server_allows_them(
    tmp_path: Path, vision_renderer: Renderer, host: Host
) -> None:
    url = host.serve("/a.png", ONE)
    async with serving(tmp_path, says("a"), vision_renderer) as server:
        said = await message_of(server, url)
    assert "send the image as a data URL, or start the server with --allow-image-urls" in said
    assert host.asked == []


async def test_an_image_is_fetched_once_for_a_session(tmp_path: Path, vision_renderer: Renderer, host: Host) -> None:
    url = host.serve("/a.png?v=1", ONE)
    async with allowed(tmp_path, vision_renderer) as server:
        first = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        await server.chat(first)
        assert await engine_images(server) == [ONE]
        host.serve("/a.png?v=1", TWO)
        await server.chat([*first, assistant("fine"), user("more")])
        server.forget_sessions()
        await server.chat([*first, assistant("fine"), user("other")])
        assert await engine_images(server) == [ONE]
        assert len(host.asked) == 1
        assert {turn["reason"] for turn in (await server.tree())[:2]} == {"first", "continued"}
        await send(server, url, session="another")
        assert (await engine_images(server), len(host.asked)) == ([TWO], 2)


async def test_requests_that_come_together_fetch_once(tmp_path: Path, vision_renderer: Renderer, host: Host) -> None:
    url = host.serve("/a.png", ONE)
    async with allowed(tmp_path, vision_renderer) as server:
        answers = await asyncio.gather(*(send(server, url) for _ in range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len(host.asked) == 1


async def test_nothing_of_the_server_is_sent_along(
    tmp_path: Path, vision_renderer: Renderer, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    url = host.redirect("/a", f"http://pictures.test:{host.port}/b.png")
    host.answers["/a"] = host.answers["/a"].replace(b"location", b"set-cookie: c=1\r\nlocation")
    host.serve("/b.png", ONE)
    async with allowed(tmp_path, vision_renderer) as server:
        assert (await send(server, url)).status_code == 200
    for head in host.asked:
        names = {line.partition(":")[0].lower() for line in head.splitlines()[1:] if line}
        assert names == {"host", "accept", "accept-encoding", "user-agent", "connection"}
        assert f"host: pictures.test:{host.port}" in head.lower()


@pytest.mark.parametrize("make", ["messages", "responses"])
async def test_the_other_apis_take_urls_too(tmp_path: Path, vision_renderer: Renderer, host: Host, make: str) -> None:
    url = host.serve("/a.png", ONE)
    block = {"type": "image", "source": {"type": "url", "url": url}}
    body: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}
    if make == "responses":
        body = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}
    async with allowed(tmp_path, vision_renderer) as server:
        await server.ok(f"/s/v1/{make}", body)
        assert await engine_images(server) == [ONE]


async def test_hosts_that_are_not_listed_are_not_asked(tmp_path: Path, vision_renderer: Renderer, host: Host) -> None:
    host.serve("/a.png", ONE)
    async with allowed(tmp_path, vision_renderer) as server:
        for url in (f"http://other.test:{host.port}/a.png", f"http://localhost:{host.port}/a.png"):
            assert "--image-hosts does not list" in await message_of(server, url)
        moved = host.redirect("/moved", f"http://other.test:{host.port}/a.png")
        assert "--image-hosts does not list" in await message_of(server, moved)
    assert len(host.asked) == 1


async def test_a_suffix_of_names_lists_no_name_that_only_ends_alike(
    tmp_path: Path, vision_renderer: Renderer, host: Host
) -> None:
    async with allowed(tmp_path, vision_renderer, image_hosts="*.pictures.test") as server:
        assert "--image-hosts does not list" in await message_of(server, f"http://evilpictures.test:{host.port}/a.png")


async def test_a_url_with_a_user_name_or_password_is_not_asked(
    tmp_path: Path, vision_renderer: Renderer, host: Host
) -> None:
    url = host.serve("/a.png", ONE)
    async with allowed(tmp_path, vision_renderer) as server:
        for user_info in ("user@", "user:pass@", ":pass@", "@"):
            said = await message_of(server, url.replace("http://", f"http://{user_info}"))
            assert "has a user name or password" in said
            assert "pass@" not in said
    assert host.asked == []


@pytest.mark.parametrize("hosts", [None, "*.test,*.internal"])
async def test_private_addresses_are_never_connected_to(
    tmp_path: Path, vision_renderer: Renderer, host: Host, hosts: str | None
) -> None:
    host.serve("/a.png", ONE)
    names = ["pictures.test", *(() if hosts else ("127.0.0.1", "localhost", "2130706433", "0x7f.1", "127.1", "[::1]"))]
    names += () if hosts else ("169.254.169.254", "10.0.0.1", "[fd00::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]")
    async with allowed(tmp_path, vision_renderer, image_hosts=hosts) as server:
        for name in names:
            said = await message_of(server, f"http://{name}:{host.port}/a.png")
            assert "not public" in said or "cannot be found" in said
    assert host.asked == []


async def test_a_name_with_one_private_address_among_public_ones_is_not_connected_to(
    tmp_path: Path, vision_renderer: Renderer, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(name: Any, port: Any, **more: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in ("127.0.0.1", "8.8.8.8")]

    async with allowed(tmp_path, vision_renderer, image_hosts=None) as server:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        assert "not public" in await message_of(server, host.serve("/secret", ONE))
    assert host.asked == []


async def test_a_redirect_to_a_private_address_is_not_followed(
    tmp_path: Path, vision_renderer: Renderer, host: Host
) -> None:
    host.serve("/secret", ONE)
    async with allowed(tmp_path, vision_renderer, image_hosts="pictures.test,*.test") as server:
        url = host.redirect("/a", f"http://inside.test:{host.port}/secret")
        assert "not public" in await message_of(server, url)
    assert len(host.asked) == 1


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://user@pictures.test/a.png",
            "http://user:pass@pictures.test/a.png",
            "http:///a.png",
            "http://[::1/a.png",
        ),
        *(
            "http://pictures.test:99999/a.png",
            "http://pictures.test:0/",
            "https://",
            "HTTP://pictures.test/" + "a" * 9000,
        ),
    ],
)
async def test_odd_urls_are_refused(tmp_path: Path, vision_renderer: Renderer, host: Host, url: str) -> None:
    async with allowed(tmp_path, vision_renderer) as server:
        await message_of(server, url)
    assert host.asked == []


async def test_answers_that_are_no_image_are_refused(tmp_path: Path, vision_renderer: Renderer, host: Host) -> None:
    async with allowed(tmp_path, vision_renderer, max_image_bytes=50_000) as server:
        assert "status 404" in await message_of(server, f"http://pictures.test:{host.port}/none")
        assert "no PNG" in await message_of(server, host.serve("/page", b"<html>"))
        assert "more than 50000 bytes" in await message_of(server, host.serve("/long", ONE + bytes(60_000)))
        packed = host.serve("/packed", b"\x1f\x8b", content_encoding="gzip")
        assert "content encoding" in await message_of(server, packed)
        around = host.redirect("/around", "/around")
        assert "redirects more than 3 times" in await message_of(server, around)
        assert sum("GET /around " in asked for asked in host.asked) == 4
        for elsewhere in ("file:///etc/passwd", "gopher://pictures.test/", "//user@pictures.test/"):
            await message_of(server, host.redirect("/elsewhere", elsewhere))
        host.answers["/broken"] = b"nonsense\r\n\r\n"
        assert "does not answer as it should" in await message_of(server, f"http://pictures.test:{host.port}/broken")


async def test_a_host_that_does_not_answer_costs_bounded_time(
    tmp_path: Path, vision_renderer: Renderer, host: Host
) -> None:
    host.slow = True
    async with allowed(tmp_path, vision_renderer, image_url_timeout_s=0.05) as server:
        said = await message_of(server, f"http://pictures.test:{host.port}/a.png")
    assert "within 0.05 seconds (--image-url-timeout-s)" in said


async def test_a_failed_fetch_is_tried_again_by_the_next_request(
    tmp_path: Path, vision_renderer: Renderer, host: Host
) -> None:
    async with allowed(tmp_path, vision_renderer) as server:
        url = f"http://pictures.test:{host.port}/a.png"
        await message_of(server, url)
        host.serve("/a.png", ONE)
        assert (await send(server, url)).status_code == 200


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((text, True) for text in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")),
        *((text, False) for text in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254")),
        *((text, False) for text in ("100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "240.0.0.1")),
        *((text, False) for text in ("::1", "::", "fe80::1", "fe80::1%eth0", "fd12::1", "ff02::1", "::ffff:10.0.0.1")),
        *((text, False) for text in ("64:ff9b::a00:1", "2002:7f00:1::", "2001:0:4136:e378::", "fec0::1", "host")),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) == public


async def test_so_many_are_fetched_at_once_and_the_others_wait(host: Host) -> None:
    url = host.serve("/a.png", ONE)
    host.slow = True
    fetch = ImageFetcher(("pictures.test",), 600.0, 2**20)
    stalled = [asyncio.create_task(fetch(url, "x")) for _ in range(MOST_AT_ONCE)]
    await until(lambda: len(host.asked) == MOST_AT_ONCE)
    waiting = asyncio.create_task(fetch(url, "x"))
    host.slow = False
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(host.asked) == MOST_AT_ONCE
    stalled[0].cancel()
    assert await waiting == ONE
    for task in stalled:
        task.cancel()
    await asyncio.gather(*stalled, return_exceptions=True)
