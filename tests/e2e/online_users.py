"""Simulated users of a served policy: endless chats, late feedback, a judge of each answer by what is said next, and a
receiver of webhooks that often fails.

`python -m tests.e2e.online_users --minutes 10` runs them against a server that is killed now and then, and prints what
became of each turn, reward and event.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import hmac
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from proxy.store.sql import codec
from tests.databases import execute
from tests.e2e.processes import Process, server_process
from tests.support import free_port, user
from tokengrove.client import AsyncClient
from tokengrove.rollout.scorers import score_live, turn_scorer

KEY = b"s" * 32
SECRET = "whsec_" + base64.b64encode(KEY).decode()
ADMIN_KEY = "a" * 16
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
TURNS_OF_EPISODE = 3


@dataclass
class Receiver:
    """Accepts events, unless it is `failing`: then it refuses a third, and leaves a tenth without an answer.

    `accepted`: how often each event was accepted, by its id. `forged`: requests with another signature.
    """

    chance: random.Random
    failing: bool = True
    url: str = ""
    requests: int = 0
    forged: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    events: dict[str, dict[str, Any]] = field(default_factory=dict)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head)}
            body = await reader.readexactly(int(headers["content-length"]))
            self.requests += 1
            drawn = self.chance.random() if self.failing else 1.0
            if drawn < 0.1:
                await reader.read()  # until the server gives up
            else:
                if drawn >= 0.4:
                    self._accept(headers, body)
                status = b"200 OK" if drawn >= 0.4 else b"503 Busy"
                writer.write(b"HTTP/1.1 %s\r\ncontent-length: 0\r\n\r\n" % status)
                await writer.drain()
        writer.close()

    def _accept(self, headers: dict[str, str], body: bytes) -> None:
        name = headers["webhook-id"]
        signed = f"{name}.{headers['webhook-timestamp']}.".encode() + body
        right = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
        self.forged += headers["webhook-signature"] != f"v1,{right}"
        self.accepted[name] += 1
        self.events[name] = orjson.loads(body)


@contextlib.asynccontextmanager
async def receiving(chance: random.Random) -> AsyncIterator[Receiver]:
    receiver = Receiver(chance)
    listener = await asyncio.start_server(receiver.answer, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/events"
    async with listener:
        yield receiver


@dataclass
class Users:
    """Users of a server at a URL. `seen`: reply ids that they got; `rated`: rewards that the server has confirmed."""

    url: str
    chance: random.Random
    seen: list[str] = field(default_factory=list)
    rated: dict[str, float] = field(default_factory=dict)
    slowest_s: float = 0.0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def chat(self, name: str) -> None:
        """One user: each answer is rated one to five turns later."""
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as http:
            started = await self._ok(
                http, "/rl/start_session", ADMIN, {"session_id": name, "episodes": {"max_turns": 3}}
            )
            control = {"authorization": f"Bearer {started['control_key']}"}
            keys = await self._ok(http, "/rl/rotate_keys", control, {"keys": ["feedback"]})
            feedback = {"authorization": f"Bearer {keys['feedback_key']}"}
            mine = {"authorization": f"Bearer {started['api_key']}"}
            unrated, messages = list[str](), list[Any]()
            while not self.over.is_set():
                messages = messages[: 2 * TURNS_OF_EPISODE - 2] if len(messages) < 2 * TURNS_OF_EPISODE else []
                messages.append(user(f"{name} says {len(self.seen)} {self.chance.random()}"))
                body = {"model": "m", "max_tokens": 8, "messages": messages}
                begun = time.monotonic()
                reply = await self._ok(http, "/v1/chat/completions", mine, body)
                self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
                self.seen.append(reply["id"])
                messages.append(reply["choices"][0]["message"])
                unrated.append(reply["id"])
                if len(unrated) > self.chance.randrange(1, 6):
                    await self._rate(http, feedback, unrated.pop(0))
            for each in unrated:
                await self._rate(http, feedback, each)

    async def judge(self) -> None:
        """Score each answer that was followed, until cancelled."""

        @turn_scorer
        async def followed(next_messages: Sequence[Mapping[str, Any]]) -> float:
            return float(len(next_messages))

        async with AsyncClient(self.url, ADMIN_KEY) as client:
            async for _ in score_live(client, [followed], pause_s=lambda failures: 0.2):
                ...

    async def _rate(self, http: httpx.AsyncClient, key: dict[str, str], reply_id: str) -> None:
        reward = round(self.chance.random(), 3)
        await self._ok(http, "/rl/set_reward", key, {"interaction_id": reply_id, "reward": reward})
        self.rated[reply_id] = reward

    async def _ok(self, http: httpx.AsyncClient, path: str, key: dict[str, str], body: Any) -> Any:
        """Send a call until it is answered, as SDKs do."""
        once = {"idempotency-key": f"{self.chance.random()}"} if path.startswith("/rl/") else {}
        for attempt in range(600):
            with contextlib.suppress(httpx.TransportError):
                headers = {**key, **once, "x-stainless-retry-count": str(attempt)}
                answer = await http.post(path, json=body, headers=headers)
                if answer.status_code < 500:
                    assert answer.status_code == 200, (path, answer.text)
                    return answer.json()
            await asyncio.sleep(0.1)
        raise AssertionError(f"{path} was never answered")


async def settle(url: str, receiver: Receiver) -> int:
    """Wait until the outbox is empty, and send dead letters again; return how many there were."""
    dead = 0
    receiver.failing = False
    async with httpx.AsyncClient(base_url=url, timeout=30, headers=ADMIN) as http:
        while True:
            states = [(await http.get(f"/rl/webhooks?state={name}")).json()["total"] for name in ("waiting", "dead")]
            if states == [0, 0]:
                return dead
            if states[1]:
                dead += (await http.post("/rl/webhooks/resend", json={})).json()["resent"]
            await asyncio.sleep(0.05)


def lost(users: Users, receiver: Receiver, database_url: str) -> dict[str, list[str]]:
    """What users or receivers were told of, or should have been, and is not there; empty lists if all is well."""
    rows = execute(database_url, "SELECT id, reward FROM interactions WHERE status = 'complete'")
    rewards = dict(rows)
    ended = {name for (name,) in execute(database_url, "SELECT session_id FROM sessions WHERE ended_order IS NOT NULL")}
    told = {each["data"]["session_id"] for each in receiver.events.values() if each["type"] == "session.ended"}
    return {
        "turns": [name for name in users.seen if name not in rewards],
        "rewards": [name for name, value in users.rated.items() if rewards.get(name) != value],
        "unrated": [name for name in users.seen if name not in users.rated],
        "ends": sorted(ended ^ told),
        "scores": unjudged(database_url),
    }


def unjudged(database_url: str) -> list[str]:
    """The turns that were followed and do not have the score of the judge: one message followed."""
    rows = execute(database_url, "SELECT id, parent_id, rewards FROM interactions WHERE status = 'complete'")
    followed = {parent for _, parent, _ in rows if parent is not None}
    return [
        name for name, _, rewards in rows if name in followed and codec.decode_json(rewards, {}) != {"followed": 1.0}
    ]


async def all_judged(database_url: str) -> None:
    """Wait until the judge has scored every turn that was followed."""
    while unjudged(database_url):  # noqa: ASYNC110 (only the database knows)
        await asyncio.sleep(0.1)


def figures(users: Users, receiver: Receiver, dead: int, database_url: str) -> dict[str, Any]:
    counts = Counter(each["type"] for each in receiver.events.values())
    [(sessions,)] = execute(database_url, "SELECT count(*) FROM sessions")
    return {
        "turns": len(users.seen),
        "rewards": len(users.rated),
        "sessions": sessions,
        "events": dict(counts),
        "requests": receiver.requests,
        "deliveries": sum(receiver.accepted.values()),
        "dead letters, sent again": dead,
        "duplicates": sum(receiver.accepted.values()) - len(receiver.accepted),
        "forged": receiver.forged,
        "slowest turn, s": round(users.slowest_s, 2),
        "judged": len([1 for (rewards,) in execute(database_url, "SELECT rewards FROM interactions") if rewards]),
        "lost": {name: len(found) for name, found in lost(users, receiver, database_url).items()},
    }


def flags(receiver: Receiver, port: int, *more: str) -> tuple[str, ...]:
    webhooks = ("--webhook", receiver.url, "--webhook-secret", SECRET, "--webhook-timeout-s", "0.5")
    admin = ("--admin-key", ADMIN_KEY, "--port", str(port))
    return ("--engine", "scripted", *webhooks, "--webhook-attempts", "2", *admin, *more)


async def run(users: Users, number: int, database_url: str, until: Callable[[], Awaitable[None]]) -> None:
    """Let users chat until `until` returns, rate their last answers, and judge what is left."""
    judging = asyncio.create_task(users.judge())
    chats = asyncio.gather(*(users.chat(f"user-{each}") for each in range(number)))
    stop: asyncio.Future[None] = asyncio.ensure_future(until())
    await asyncio.wait(set[asyncio.Future[Any]]({chats, stop}), return_when=asyncio.FIRST_COMPLETED)
    users.over.set()
    await stop
    await chats
    judged = asyncio.ensure_future(all_judged(database_url))
    await asyncio.wait({judging, judged}, return_when=asyncio.FIRST_COMPLETED)
    judging.cancel()
    await asyncio.gather(judging, return_exceptions=True)
    assert judged.done(), judging


async def soak(minutes: float, number: int, kill_every_s: float, folder: Path) -> dict[str, Any]:
    """Chat for some minutes with a server that is killed now and then and started again."""
    chance, port, url = random.Random(), free_port(), f"sqlite:///{folder / 'served.db'}"
    async with receiving(chance) as receiver:
        users, until, kills = Users(f"http://127.0.0.1:{port}", chance), time.monotonic() + 60 * minutes, 0
        with contextlib.ExitStack() as stack:
            start = lambda: stack.enter_context(server_process(folder, *flags(receiver, port)))  # noqa: E731
            process: Process = await asyncio.to_thread(start)

            async def wreck() -> None:
                nonlocal process, kills
                while (left := until - time.monotonic()) > 0:
                    await asyncio.sleep(min(left, kill_every_s))
                    if until - time.monotonic() > kill_every_s / 2:
                        await asyncio.to_thread(process.kill)
                        process, kills = await asyncio.to_thread(start), kills + 1

            await run(users, number, url, wreck)
            dead = await settle(process.url, receiver)
            return {"kills": kills, **figures(users, receiver, dead, url)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--kill-every-s", type=float, default=60)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="online-") as folder:
        found = asyncio.run(soak(asked.minutes, asked.users, asked.kill_every_s, Path(folder)))
    for name, value in found.items():
        print(f"{name:26} {value}")


if __name__ == "__main__":
    main()
