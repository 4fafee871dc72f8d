"""Images of turns are stored with their session, read back by other replicas and after a restart, and never logged."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from proxy.api.turn_routes import App
from proxy.commands.audit import audit
from proxy.engine.scripted.scripts import Fault, Reply, play
from proxy.rendering.renderer import Renderer
from proxy.store.inspection import inspecting
from proxy.store.turn_log import TurnLog
from proxy.turns import commits
from tests.databases import execute
from tests.logs import lines_of
from tests.support import default_url, sampled, says, serving, until, user
from tests.vision import image_file, image_url, text_part
from tokengrove.client import AsyncClient, Client
from tokengrove.errors import NotFound, StoreUnavailable
from tokengrove.spans import Tracing

ONE, TWO = image_file(64, 48, 1), image_file(80, 60, 2)


def shows(text: str, *images: bytes) -> dict[str, Any]:
    """A user message with images before its text."""
    return user([*map(image_url, images), text_part(text)])  # type: ignore[arg-type]


def stored(url: str) -> set[str]:
    return {row[0] for row in execute(url, "SELECT digest FROM images")}


def findings(url: str) -> list[str]:
    with inspecting(url) as inspection:
        return [str(finding) for finding in audit(inspection).findings]


async def test_an_image_of_a_session_is_served_as_it_came(tmp_path: Path, vision_renderer: Renderer) -> None:
    async with serving(tmp_path, says("A.", "B."), vision_renderer) as server:
        await server.chat([shows("Look.", ONE.data)])
        await server.chat([user("No image.")], session="other")
        answer = await server.http.get(f"/rl/sessions/s/images/{ONE.digest}")
        assert (answer.status_code, answer.content) == (200, ONE.data)
        assert {name: answer.headers[name] for name in ("content-type", "cache-control", "x-content-type-options")} == {
            "content-type": "image/png",
            "cache-control": "private, max-age=31536000, immutable",
            "x-content-type-options": "nosniff",
        }
        assert answer.headers["vary"] == "authorization, x-api-key"
        assert "sandbox" in answer.headers["content-security-policy"]
        for path, code in (
            (f"s/images/{TWO.digest}", "not_found"),
            ("s/images/x%00y", "not_found"),
            ("s/images/%ff", "not_found"),
            ("s/images/%ed%a0%80", "not_found"),
            (f"other/images/{ONE.digest}", "not_found"),
            (f"nobody/images/{ONE.digest}", "session_not_found"),
        ):
            answer = await server.http.get(f"/rl/sessions/{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)


async def test_an_image_is_shown_to_the_administrator_alone(tmp_path: Path, vision_renderer: Renderer) -> None:
    admin = {"authorization": "Bearer admin"}
    async with serving(tmp_path, says("A."), vision_renderer, admin_key="admin") as server:
        started = await server.ok("/rl/start_session", {"task_id": "t", "session_id": "s"}, headers=admin)
        own = {"authorization": f"Bearer {started['api_key']}"}
        await server.ok("/v1/chat/completions", {"model": "m", "messages": [shows("Look.", ONE.data)]}, headers=own)
        path = f"/rl/sessions/s/images/{ONE.digest}"
        codes = [(await server.http.get(path, headers=headers)).status_code for headers in (admin, own, {})]
    assert codes == [200, 403, 401]


async def test_both_clients_read_an_image(tmp_path: Path, vision_renderer: Renderer) -> None:
    async with serving(tmp_path, says("A."), vision_renderer) as server:
        await server.chat([shows("Look.", ONE.data)])
        async with AsyncClient(app=server.app) as client:
            assert await client.image("s", ONE.digest) == ONE.data
            with pytest.raises(NotFound, match="has no image"):
                await client.image("s", TWO.digest)
        assert await asyncio.to_thread(read, server.app) == ONE.data


def read(app: App) -> bytes:
    with Client(app=app) as client:
        return client.image("s", ONE.digest)


async def test_a_restart_knows_the_images_of_a_session_and_stores_them_once(
    tmp_path: Path, database_url: str, vision_renderer: Renderer
) -> None:
    messages = [shows("Look.", ONE.data)]
    async with serving(tmp_path, says("A."), vision_renderer, database_url=database_url) as server:
        messages.append(await server.answer(messages))
    async with serving(tmp_path, says("B."), vision_renderer, database_url=database_url) as server:
        await server.chat([*messages, shows("And?", ONE.data, TWO.data)])
        session = await server.app.state.registry.get("s")
        assert session.images.keys() == {ONE.digest, TWO.digest}
        assert session.image_sizes == {ONE.digest: len(ONE.data), TWO.digest: len(TWO.data)}
        seen = server.engine.requests[-1].images
        assert await seen.read() == [ONE, ONE, TWO]
        assert [turn["aligned"] for turn in await server.tree()] == [False, True]
        assert server.app.state.metrics.turns.images.by[()] == 1
    assert stored(database_url) == {ONE.digest, TWO.digest}
    assert findings(database_url) == []


async def test_a_turn_on_another_replica_finds_the_images_of_its_session(
    tmp_path: Path, postgres_url: str, vision_renderer: Renderer
) -> None:
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(serving(tmp_path, says(word), vision_renderer, database_url=postgres_url))
            for word in ("A.", "B.")
        ]
        parts = [{"type": "input_image", "image_url": image_url(ONE.data)["image_url"]["url"]}]
        first = {"model": "m", "input": [{"role": "user", "content": parts}]}
        answer = await one.ok("/s/v1/responses", first)
        more = {"model": "m", "input": "And?", "previous_response_id": answer["id"]}
        await other.ok("/s/v1/responses", more)
        seen = other.engine.requests[-1].images
        assert await seen.read() == [ONE]
        assert (await other.tree())[1]["aligned"] is True
        session = await other.app.state.registry.get("s")
        assert session.images.keys() == {ONE.digest} and session.image_sizes == {ONE.digest: len(ONE.data)}


async def test_an_image_that_is_stored_while_those_of_another_replica_are_read_counts(
    tmp_path: Path, postgres_url: str, vision_renderer: Renderer
) -> None:
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(serving(tmp_path, says(*words), vision_renderer, database_url=postgres_url))
            for words in (("A.", "C."), ("B.",))
        ]
        await one.chat([user("Hello.")])
        await other.chat([shows("Look.", ONE.data)])
        news = one.app.state.registry._news
        load_images = news.load_images

        async def read_before_a_commit(session_id: str) -> Any:
            found = await load_images(session_id)
            await one.chat([shows("Look here.", TWO.data)])
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(news, "load_images", read_before_a_commit)
            session = await one.app.state.registry.get("s")
        assert session.images.keys() == {ONE.digest, TWO.digest}
        assert session.image_sizes == {ONE.digest: len(ONE.data), TWO.digest: len(TWO.data)}


async def test_a_session_that_follows_another_has_the_images_of_its_history(
    tmp_path: Path, vision_renderer: Renderer
) -> None:
    async with serving(tmp_path, says("A.", "B."), vision_renderer) as server:
        messages = [shows("Look.", ONE.data)]
        answer = await server.ok("/v1/chat/completions", {"model": "m", "messages": messages})
        await server.ok("/rl/end_session", {})
        messages += [answer["choices"][0]["message"], user("And?")]
        await server.ok("/v1/chat/completions", {"model": "m", "messages": messages})
    linked = execute(default_url(tmp_path), "SELECT session_id, digest FROM session_images ORDER BY session_id")
    assert linked == [("default", ONE.digest), ("default-1", ONE.digest)]
    assert findings(default_url(tmp_path)) == []


async def test_the_choices_of_one_reply_share_their_images(tmp_path: Path, vision_renderer: Renderer) -> None:
    async with serving(tmp_path, says("A.", "B.", "C."), vision_renderer) as server:
        await server.chat([shows("Look.", ONE.data, TWO.data, ONE.data)], n=3)
        turns = await server.app.state.store.recordings.load_interactions("s")
        assert [[image.digest for image in turn.images] for turn in turns] == [[ONE.digest, TWO.digest, ONE.digest]] * 3
        assert server.app.state.metrics.turns.images.by[()] == 2
    assert findings(default_url(tmp_path)) == []


@pytest.mark.parametrize(
    ("limits", "settings", "param", "found"),
    [
        ({"max_images": 1}, {}, "limits.max_images", "2 images, and 1"),
        ({"max_images": 5}, {"max_session_images": 1}, "--max-session-images", "2 images, and 1"),
        ({"max_image_bytes": 300}, {}, "limits.max_image_bytes", "bytes of images, and 300"),
        ({}, {"max_session_image_bytes": 300}, "--max-session-image-bytes", "bytes of images, and 300"),
    ],
)
async def test_a_session_takes_as_many_images_as_its_limits_and_the_servers_say(
    tmp_path: Path,
    vision_renderer: Renderer,
    limits: dict[str, int],
    settings: dict[str, int],
    param: str,
    found: str,
) -> None:
    assert len(ONE.data) <= 300 < len(ONE.data) + len(TWO.data)
    async with serving(tmp_path, says("A.", "B.", "C."), vision_renderer, **settings) as server:
        await server.ok("/rl/start_session", {"task_id": "t", "session_id": "s", "limits": limits})
        messages = [shows("Look.", ONE.data)]
        messages.append(await server.answer(messages))
        body = {"model": "m", "messages": [*messages, shows("And?", TWO.data)]}
        refused = await server.post("/s/v1/chat/completions", body)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (403, "session_limit_reached", param)
        assert found in error["message"]
        await server.chat([*messages, shows("The same again?", ONE.data)])
    assert stored(default_url(tmp_path)) == {ONE.digest}


async def test_a_failed_turn_keeps_its_images_too(tmp_path: Path, vision_renderer: Renderer) -> None:
    script = play([Reply(sampled("A."), fault=Fault.ERROR)])
    async with serving(tmp_path, script, vision_renderer) as server:
        answer = await server.post("/s/v1/chat/completions", {"model": "m", "messages": [shows("Look.", ONE.data)]})
        assert answer.is_error
        assert (await server.http.get(f"/rl/sessions/s/images/{ONE.digest}")).content == ONE.data
    assert findings(default_url(tmp_path)) == []


@pytest.mark.parametrize("held", [True, False])
async def test_a_failure_that_waits_for_the_database_holds_no_images_outside_of_the_pool(
    tmp_path: Path, vision_renderer: Renderer, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    monkeypatch.setattr(commits, "_RETRIED_WITHIN_S", 0.0)
    append, refusals = TurnLog.append, [StoreUnavailable("down")]

    async def refused(log: TurnLog, *turn: Any) -> int | None:
        if refusals:
            raise refusals.pop()
        return await append(log, *turn)

    monkeypatch.setattr(TurnLog, "append", refused)
    script = play([Reply(sampled("A."), fault=Fault.ERROR), Reply(sampled("B."))])
    settings = {} if held else {"image_memory_bytes": 1}
    async with serving(tmp_path, script, vision_renderer, **settings) as server:
        body = {"model": "m", "messages": [shows("Look.", ONE.data)]}
        assert (await server.post("/s/v1/chat/completions", body)).is_error
        [turn] = server.app.state.turns._commits._unrecorded
        assert (turn.request.files, turn.generate.images) == ({}, None)
        await server.chat([user("Are you there?")])
        await until(lambda: len(execute(default_url(tmp_path), "SELECT 1 FROM interactions")) == 2)
        assert [turn["status"] for turn in await server.tree()] == ["complete", "failed"]
    assert stored(default_url(tmp_path)) == ({ONE.digest} if held else set())
    assert findings(default_url(tmp_path)) == []


async def test_images_of_a_session_that_is_deleted_while_a_turn_runs_are_gone(
    tmp_path: Path, database_url: str, vision_renderer: Renderer
) -> None:
    async with serving(tmp_path, says("A.", "B."), vision_renderer, database_url=database_url) as server:
        messages = [shows("Look.", ONE.data)]
        messages.append(await server.answer(messages))
        server.engine.script = play([Reply(sampled("B."), fault=Fault.HANG)])
        body = {"model": "m", "messages": [*messages, shows("And?", TWO.data)]}
        turn = asyncio.create_task(server.post("/s/v1/chat/completions", body))
        await until(lambda: len(server.engine.requests) == 2)
        await server.http.delete("/rl/sessions/s")
        assert (await turn).is_error
    assert stored(database_url) == set()
    assert execute(database_url, "SELECT 1 FROM session_images") == []


async def test_no_line_of_the_log_no_error_no_span_and_no_metric_has_an_image(
    tmp_path: Path, vision_renderer: Renderer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    exporter = InMemorySpanExporter()
    monkeypatch.setattr("proxy.app.start_tracing", lambda tell: Tracing(exporter))
    secrets = [each for data in (ONE.data, TWO.data) for each in forms(data)]
    said: list[str] = []
    assert secrets[0] in shows("", ONE.data)["content"][0]["image_url"]["url"]
    async with serving(
        tmp_path, says("A.", "B."), vision_renderer, log_level="debug", log_content=True, max_session_images=1
    ) as server:
        messages = [shows("Look.", ONE.data)]
        messages.append(await server.answer(messages))
        for images in ((TWO.data,), (TWO.data[:-40],), (ONE.data + b"x", b"no image")):  # too many, and broken ones
            body = {"model": "m", "messages": [*messages, shows("And?", *images)]}
            refused = await server.post("/s/v1/chat/completions", body)
            assert refused.is_error
            said.append(refused.text)
        said.append((await server.http.get("/metrics")).text)
        said += [repr(session) for session in server.app.state.registry.sessions()]
        said += [repr(request) for request in server.engine.requests]
    said += [*lines_of(caplog), *lines_of(caplog, form="json"), *(repr(record.args) for record in caplog.records)]
    said += [span.to_json() for span in exporter.get_finished_spans()]
    assert len(said) > 30
    for text in said:
        assert not [secret for secret in secrets if secret in text], text[:300]


def forms(data: bytes) -> list[str]:
    """Pieces of an image as a text may have them: base64, escapes and hex."""
    return [b64encode(data).decode()[8:60], repr(data[8:40])[2:-1], data[40:80].hex()]
