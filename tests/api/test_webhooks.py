"""Receivers of webhooks are told of events at least once, signed; a failing or slow one delays nothing."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.settings import Settings
from proxy.webhooks import deliverer
from tests.databases import execute
from tests.support import Server, says, serving, until, user
from tokengrove.errors import ConfigurationError

SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()
ANSWERS = {200: b"OK", 302: b"Found", 410: b"Gone", 500: b"Broken"}


class Receiver:
    """An HTTP server that records requests. `status` decides each answer; None: it never answers."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.accepted: list[dict[str, Any]] = []
        self.status: Callable[[int], int | None] = lambda number: 200
        self.url = ""

    @property
    def types(self) -> list[str]:
        return [each["type"] for each in self.accepted]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head)}
            body = await reader.readexactly(int(headers["content-length"]))
            self.got.append((headers, body))
            status = self.status(len(self.got))
            if status is None:
                await reader.read()  # until the deliverer gives up
            else:
                if status == 200:
                    self.accepted.append({**orjson.loads(body), "id": headers["webhook-id"]})
                to = f"location: {self.url}/elsewhere\r\n".encode() if status == 302 else b""
                writer.write(b"HTTP/1.1 %d %s\r\n%scontent-length: 0\r\n\r\n" % (status, ANSWERS[status], to))
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    listener = await asyncio.start_server(receiver.answer, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        yield receiver


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliverer, "_FIRST_S", 0.001)


@contextlib.asynccontextmanager
async def told(folder: Path, url: str, *receivers: Receiver, **more: Any) -> AsyncIterator[Server]:
    urls = tuple(each.url for each in receivers)
    script = says(*["ok"] * 500)
    async with serving(folder, script, database_url=url, webhook=urls, webhook_secret=SECRET, **more) as server:
        yield server


async def deliveries(server: Server, state: str) -> Any:
    return (await server.http.get(f"/rl/webhooks?state={state}")).raise_for_status().json()


async def listed(server: Server, state: str, count: int) -> list[dict[str, Any]]:
    """The deliveries in a state, once they are `count`."""
    while (found := await deliveries(server, state))["total"] != count:  # noqa: ASYNC110 (only the server knows)
        await asyncio.sleep(0.01)
    return list(found["deliveries"])


async def test_the_end_of_a_session_is_told_with_a_signature_that_covers_id_time_and_body(
    tmp_path: Path, database_url: str
) -> None:
    async with receiving() as receiver, told(tmp_path, database_url, receiver) as server:
        await server.chat([user("hi")], "a")
        await server.ok("/a/rl/end_session", {"outcome": "Finished"})
        await until(lambda: len(receiver.accepted) == 1)
        headers, body = receiver.got[0]
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.new(b"k" * 24, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
        [event] = receiver.accepted
        assert event["type"] == "session.ended"
        assert event["data"] == {
            **{"session_id": "a", "task_id": "a", "group_id": None, "status": "ended"},
            **{"outcome": "Finished", "exit_reason": None, "withdrawn": False},
        }


async def test_a_reward_after_the_end_is_told_and_one_before_it_is_not(tmp_path: Path, database_url: str) -> None:
    async with receiving() as receiver, told(tmp_path, database_url, receiver) as server:
        reply = await server.chat([user("hi")], "a")
        await server.ok("/a/rl/set_reward", {"reward": 0.5})
        await server.ok("/a/rl/end_session", {})
        await server.ok("/a/rl/set_reward", {"reward": 1.0, "interaction_id": reply["id"]})
        await server.ok("/a/rl/mark", {"interaction_id": reply["id"], "trainable": False})
        await until(lambda: len(receiver.accepted) == 2)
        late = next(each for each in receiver.accepted if each["type"] == "reward.late")
        assert late["data"] == {"session_id": "a", "group_id": None, "interaction_ids": [reply["id"]]}
        assert sorted(receiver.types) == ["reward.late", "session.ended"]


@pytest.mark.parametrize("last", ["end_session", "withdraw_session", "delete"])
async def test_a_group_is_told_ready_once_when_its_last_session_has_gone(
    tmp_path: Path, database_url: str, last: str
) -> None:
    async with receiving() as receiver, told(tmp_path, database_url, receiver) as server:
        for name in "abc":
            start = {"session_id": name, "group_id": "g", "group_size": 2}
            await server.ok("/rl/start_session", start)
        for name in "ab":
            await server.ok(f"/{name}/rl/end_session", {})
        await until(lambda: len(receiver.accepted) == 2)
        assert "group.ready" not in receiver.types
        if last == "delete":
            (await server.http.delete("/rl/sessions/c")).raise_for_status()
        else:
            await server.ok(f"/c/rl/{last}", {})
        await until(lambda: "group.ready" in receiver.types)
        [ready] = [each["data"] for each in receiver.accepted if each["type"] == "group.ready"]
        members = ["a", "b", "c"] if last == "end_session" else ["a", "b"]
        assert ready == {"group_id": "g", "group_size": 2, "session_ids": members}


async def test_a_new_weight_version_is_told(tmp_path: Path, database_url: str) -> None:
    async with receiving() as receiver, told(tmp_path, database_url, receiver) as server:
        await server.ok("/engine/update_weights", {"path": "anywhere", "version": 7})
        await until(lambda: len(receiver.accepted) == 1)
        assert receiver.types == ["version.published"] and receiver.accepted[0]["data"]["version"] == 7


async def test_an_event_is_tried_again_with_the_same_id_until_it_is_accepted(tmp_path: Path, database_url: str) -> None:
    async with receiving() as receiver, told(tmp_path, database_url, receiver) as server:
        receiver.status = lambda number: 500 if number < 4 else 200
        await server.chat([user("hi")], "a")
        await server.ok("/a/rl/end_session", {})
        await until(lambda: len(receiver.accepted) == 1)
        assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1 and len(receiver.got) == 4
        assert len({body for _, body in receiver.got}) == 1
        await listed(server, "waiting", 0)


@pytest.mark.parametrize(("status", "why"), [(500, "HTTP 500"), (302, "HTTP 302"), (None, "no answer within 0.1 s")])
async def test_a_receiver_that_never_accepts_leaves_a_dead_letter_that_can_be_sent_again(
    tmp_path: Path, database_url: str, status: int | None, why: str
) -> None:
    limits = {"webhook_attempts": 2, "webhook_timeout_s": 0.1 if status is None else 30.0}
    async with receiving() as receiver, told(tmp_path, database_url, receiver, **limits) as server:
        receiver.status = lambda number: status
        await server.chat([user("hi")], "a")
        await server.ok("/a/rl/end_session", {})
        [dead] = await listed(server, "dead", 1)
        assert (dead["event"], dead["attempts"], dead["error"]) == ("session.ended", 2, why)
        assert len(receiver.got) == 2, "a redirect was followed"
        receiver.status = lambda number: 200
        assert await server.ok("/rl/webhooks/resend", {"ids": ["evt_of_nobody"]}) == {"resent": 0}
        assert await server.ok("/rl/webhooks/resend", {"ids": [dead["id"]]}) == {"resent": 1}
        await until(lambda: len(receiver.accepted) == 1)
        assert receiver.accepted[0]["id"] == dead["id"]


async def test_a_receiver_that_is_gone_is_not_asked_again(tmp_path: Path, database_url: str) -> None:
    async with receiving() as receiver, told(tmp_path, database_url, receiver) as server:
        receiver.status = lambda number: 410
        await server.chat([user("hi")], "a")
        await server.ok("/a/rl/end_session", {})
        await listed(server, "dead", 1)
        assert len(receiver.got) == 1


async def test_a_receiver_that_never_answers_delays_neither_turns_nor_the_other_receiver(
    tmp_path: Path, database_url: str
) -> None:
    async with receiving() as hangs, receiving() as good, told(tmp_path, database_url, hangs, good) as server:
        hangs.status = lambda number: None
        for number in range(40):
            await server.chat([user("hi")], f"s{number}")
            await server.ok(f"/s{number}/rl/end_session", {})
        await until(lambda: len(good.accepted) == 40)
        assert hangs.got and not hangs.accepted
        assert len({each["id"] for each in good.accepted}) == 40


async def test_what_was_not_delivered_before_a_stop_is_delivered_after_the_start(
    tmp_path: Path, database_url: str
) -> None:
    async with receiving() as receiver:
        receiver.status = lambda number: None
        async with told(tmp_path, database_url, receiver) as server:
            await server.chat([user("hi")], "a")
            await server.ok("/a/rl/end_session", {})
            await until(lambda: len(receiver.got) == 1)
        execute(database_url, "UPDATE webhook_deliveries SET due_at = 1")  # its lease is over
        receiver.status = lambda number: 200
        async with told(tmp_path, database_url, receiver):
            await until(lambda: len(receiver.accepted) == 1)
        assert receiver.got[0][0]["webhook-id"] == receiver.got[1][0]["webhook-id"]


async def test_servers_of_one_database_share_the_deliveries(tmp_path: Path, postgres_url: str) -> None:
    async with (
        receiving() as receiver,
        told(tmp_path, postgres_url, receiver) as one,
        told(tmp_path, postgres_url, receiver) as two,
    ):
        names = [f"s{number}" for number in range(30)]
        for name in names:
            await one.chat([user("hi")], name)
        ends = (each.ok(f"/{name}/rl/end_session", {}) for each, name in zip([one, two] * 15, names, strict=True))
        await asyncio.gather(*ends)
        await until(lambda: len(receiver.accepted) >= 30)
        await listed(one, "waiting", 0)
        counts = Counter(each["data"]["session_id"] for each in receiver.accepted)
        assert counts == dict.fromkeys(names, 1)


async def test_a_refused_end_tells_nothing(tmp_path: Path, database_url: str) -> None:
    async with receiving() as receiver, told(tmp_path, database_url, receiver) as server:
        await server.chat([user("hi")], "a")
        refused = await server.http.post("/a/rl/end_session", json={"reward": 1.0, "interaction_id": "nobody's"})
        assert refused.status_code == 404
        assert execute(database_url, "SELECT * FROM webhook_deliveries") == []


async def test_a_request_never_names_a_receiver(tmp_path: Path, database_url: str) -> None:
    async with receiving() as receiver, told(tmp_path, database_url, receiver, admin_key="a" * 16) as server:
        admin = {"authorization": "Bearer " + "a" * 16}
        refused = await server.http.post("/rl/webhooks/resend", json={"url": "http://127.0.0.1"}, headers=admin)
        assert refused.status_code == 400 and "'url' is unknown" in refused.text
        for ask in (server.http.get("/rl/webhooks"), server.http.post("/rl/webhooks/resend", json={})):
            assert (await ask).status_code == 401


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"webhook": ("http://a/b",)}, "--webhook needs"),
        ({"webhook_secret": SECRET}, "no effect without --webhook"),
        ({"webhook": ("http://a/b",), "webhook_secret": "secret"}, "--webhook-secret is not whsec_"),
        ({"webhook": ("ftp://a/b",), "webhook_secret": SECRET}, "--webhook 'ftp://a/b' is not a URL"),
        ({"webhook": ("http://me:it@a/b",), "webhook_secret": SECRET}, "is not a URL"),
        ({"webhook": ("http://a/b",) * 2, "webhook_secret": SECRET}, "a URL twice"),
    ],
)
def test_settings_of_webhooks_that_cannot_work_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Settings(**settings)
