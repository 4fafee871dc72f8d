"""Replicas of two releases serve one PostgreSQL side by side, while agents go on and replicas are replaced one by one.

The next release is a copy of this tree with one more migration, which it uses. TOKENGROVE_TEST_RELEASE_BEFORE names a
checkout of the release before, whose servers are then replaced by those of this tree too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.store import migrations
from proxy.store.store import Store
from tests.databases import execute
from tests.e2e import processes
from tests.e2e.load import Refused, check_database, streamed, unary
from tests.e2e.processes import ROOT, Process
from tests.support import user
from tokengrove.reasons import Reason, Status

pytestmark = pytest.mark.engines  # each server is a new interpreter: half a minute

FLAGS = ("--engine", "scripted", "--engine-arg", "play=agent", "--engine-arg", "delay_s=0.03")
AGENTS = 8
NEXT = f"{int(migrations.head()) + 1:04}"
MIGRATION = f'''
import sqlalchemy as sa
from alembic import op

revision, down_revision, oldest_server = "{NEXT}", "{migrations.head()}", "0009"


def upgrade():
    op.add_column("interactions", sa.Column("mood", sa.Text()))
    op.create_table("moods", sa.Column("name", sa.Text(), primary_key=True))
    with op.get_context().autocommit_block():
        op.create_index("ix_interactions_mood", "interactions", ["mood"], postgresql_concurrently=True)
'''
# What the next release does that this one does not: a column, keys of JSON columns, and a reason.
CHANGES = {
    "proxy/store/sql/tables.py": {
        '    Column("asked", LargeBinary': '    Column("mood", Text),\n    Column("asked", LargeBinary'
    },
    "proxy/store/sql/rows.py": {
        '        "asked": node.asked,\n': '        "asked": node.asked,\n        "mood": "calm",\n',
        '"sampling": node.sampling.to_json(),': '"sampling": {**node.sampling.to_json(), "warmth": 2},',
        '"reason": str(node.reason),': '"reason": str(node.reason).replace("resampled", "asked_again"),',
    },
    "tokengrove/reasons.py": {"    BRANCHED = (": '    ASKED_AGAIN = "asked_again", "A new word."\n    BRANCHED = ('},
}


def make_next_release(folder: Path) -> Path:
    for name in ("proxy", "tokengrove", "migrations"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "migrations" / "versions" / f"{NEXT}_add_mood.py").write_text(MIGRATION)
    for name, changes in CHANGES.items():
        text = (folder / name).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return folder


@dataclass
class Agents:
    """Agents that send each turn to the next replica. A turn whose connection is cut, or that gets 503, is sent again.

    `replicas`: the release of each replica that takes requests, by its address. `said`: the id and text of every reply,
    by session. `crossed`: how often a turn continued one that another release had answered, by both releases.
    """

    replicas: dict[str, str] = field(default_factory=dict)
    said: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    crossed: Counter[tuple[str, str]] = field(default_factory=Counter)
    retried: int = 0
    stopped: bool = False
    _sent: int = 0
    _heard: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def turns(self) -> int:
        return sum(map(len, self.said.values()))

    def next_replica(self) -> str:
        self._sent += 1
        return list(self.replicas)[self._sent % len(self.replicas)]

    async def post(self, http: httpx.AsyncClient, path: str, body: Any) -> Any:
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = await http.post(self.next_replica() + path, json=body)
                if answer.status_code != 503:
                    assert answer.status_code == 200, answer.text
                    return answer.json()
            self.retried += 1

    async def talk(self, session: str) -> None:
        async with httpx.AsyncClient(timeout=60, headers={"x-request-id": f"of-{session}"}) as http:
            await self.post(http, "/rl/start_session", {"session_id": session, "task_id": "t"})
            messages: list[Any] = [user(f"hello from {session}")]
            last = None
            self.said[session] = []
            while not self.stopped:
                again = len(self.said[session]) % 4 == 3  # the same conversation is asked once more
                for _ in range(1 + again):
                    reply_id, text, release = await self.turn(http, session, messages)
                    self.said[session].append((reply_id, text))
                    self._heard.set()
                    if last is not None:
                        self.crossed[last, release] += 1
                    last = release
                messages += [{"role": "assistant", "content": text}, user("go on")]
            await self.post(http, f"/{session}/rl/set_reward", {"reward": 1.0})
            await self.post(http, f"/{session}/rl/end_session", {"outcome": "Finished"})

    async def turn(self, http: httpx.AsyncClient, session: str, messages: list[Any]) -> tuple[str, str, str]:
        send = streamed if len(messages) % 4 == 1 else unary
        body = {"model": "m", "messages": messages, "max_tokens": 12, "stream": send is streamed}
        for attempt in range(50):
            url = self.next_replica()
            release = self.replicas[url]
            http.headers["x-stainless-retry-count"] = str(attempt)
            try:
                return (*await send(http, f"{url}/{session}/v1/chat/completions", body, []), release)
            except (Refused, httpx.TransportError):
                self.retried += 1
                await asyncio.sleep(0.05)
        raise AssertionError("no replica answered")

    async def read_everywhere(self) -> None:
        """Let each replica export every session, with the turns that the other release has answered."""
        async with httpx.AsyncClient(timeout=60) as http:
            for url in self.replicas:
                for session in self.said:
                    body = {"session_id": session, "layout": "concat", "include": ["messages"]}
                    exported = await http.post(f"{url}/export_trajectories", json=body)
                    assert exported.status_code == 200 and exported.json()["samples"], exported.text

    async def more(self, turns: int) -> None:
        """Wait for so many more turns of all agents together."""
        until = self.turns + turns
        while self.turns < until:
            self._heard.clear()
            await self._heard.wait()


@dataclass
class Fleet:
    """The replicas of a database, of which some run. `start` and `stop` are what an operator does."""

    folder: Path
    database_url: str
    agents: Agents
    running: dict[str, Process] = field(default_factory=dict)

    async def start(self, name: str, root: Path) -> None:
        flags = {"database_url": self.database_url, "root": root}
        server = await asyncio.to_thread(Process, self.folder, *FLAGS, **flags)  # type: ignore[arg-type]
        self.running[name] = server
        self.agents.replicas[server.url] = name[:3]

    async def stop(self, name: str) -> None:
        """Take a replica out of the load balancer when it stops accepting: at SIGTERM, as Kubernetes does."""
        server = self.running.pop(name)
        server.terminate()
        del self.agents.replicas[server.url]
        assert await asyncio.to_thread(server.wait) == 0, server.output

    async def upgrade(self, root: Path) -> str:
        arguments = ("db", "upgrade", "--database-url", self.database_url)
        done = await asyncio.to_thread(lambda: processes.execute(*arguments, cwd=self.folder, root=root))
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def go_back(self, old: Path) -> None:
        await self.start("old 3", old)
        assert f"is at revision {NEXT}, newer than ours ({migrations.head()})" in self.running["old 3"].output
        await self.stop("new 1")
        await self.agents.more(80)
        await self.agents.read_everywhere()
        await self.start("old 4", old)
        await self.stop("new 2")
        await self.agents.more(40)


@contextlib.asynccontextmanager
async def fleet(folder: Path, database_url: str) -> AsyncIterator[Fleet]:
    """Replicas, and agents that talk to them once the first has started, until the block ends."""
    agents = Agents()
    served = Fleet(folder, database_url, agents)
    try:
        yield served
    finally:
        for server in served.running.values():
            server.kill()


async def replace(served: Fleet, old: Path, new: Path, *, back: bool) -> None:
    """Upgrade a fleet of two while agents talk; with `back`, then go back to the old release."""
    await served.upgrade(old)
    await asyncio.gather(served.start("old 1", old), served.start("old 2", old))
    async with asyncio.TaskGroup() as talks:
        for number in range(AGENTS):
            talks.create_task(served.agents.talk(f"s{number}"))
        await served.agents.more(40)
        await served.upgrade(new)
        await served.agents.more(20)
        await served.start("new 1", new)
        await served.stop("old 1")
        await served.agents.more(80)
        await served.agents.read_everywhere()
        await served.start("new 2", new)
        await served.stop("old 2")
        await served.agents.more(40)
        if back:
            await served.go_back(old)
        served.agents.stopped = True
    await check(served)


async def check(served: Fleet) -> None:
    """Every reply that an agent got is in the tree once, as it was; nothing else is complete; all of it is exported."""
    agents = served.agents
    print(f"{agents.turns} turns, {agents.retried} sent again, continued across releases: {dict(agents.crossed)}")
    store = Store.open(served.database_url)
    async with httpx.AsyncClient(timeout=60) as http:
        for session, said in agents.said.items():
            stored = await store.recordings.load_interactions(session)
            nodes = [node for node in stored if node.status is Status.COMPLETE]
            assert [(node.id, node.output.content) for node in nodes] == said
            assert [node.reason for node in nodes].count(Reason.FIRST) == 1
            assert all(node.aligned for node in nodes if node.reason is Reason.CONTINUED)
            body = {"session_id": session, "layout": "tree"}
            [sample] = (await agents.post(http, "/export_trajectories", body))["samples"]
            assert sum(sample["loss_mask"]) == sum(len(node.output_ids) for node in nodes)
    await store.close()
    assert agents.crossed["old", "new"] and agents.crossed["new", "old"]


@pytest.fixture
def next_release(tmp_path: Path) -> Path:
    return make_next_release(tmp_path / "next")


def test_replicas_are_upgraded_and_go_back_one_at_a_time_while_agents_talk(
    tmp_path: Path, unmigrated_postgres_url: str, next_release: Path
) -> None:
    async def run() -> None:
        async with fleet(tmp_path, unmigrated_postgres_url) as served:
            await replace(served, ROOT, next_release, back=True)

    asyncio.run(run())
    # By the next release: to this one its new word would be a finding.
    command = ("db", "check", "--database-url", unmigrated_postgres_url)
    checked = processes.execute(*command, cwd=tmp_path, root=next_release)
    assert checked.returncode == 0 and checked.stdout.endswith(" 0 findings\n"), checked.stdout + checked.stderr
    moods = dict(execute(unmigrated_postgres_url, "SELECT coalesce(mood, ''), count(*) FROM interactions GROUP BY 1"))  # type: ignore[arg-type]
    assert moods.keys() == {"", "calm"}


@pytest.mark.skipif(
    "TOKENGROVE_TEST_RELEASE_BEFORE" not in os.environ, reason="names no checkout of the release before"
)
def test_replicas_of_the_release_before_are_upgraded_to_this_one(tmp_path: Path, unmigrated_postgres_url: str) -> None:
    before = Path(os.environ["TOKENGROVE_TEST_RELEASE_BEFORE"])

    async def run() -> None:
        async with fleet(tmp_path, unmigrated_postgres_url) as served:
            await replace(served, before, ROOT, back=False)

    asyncio.run(run())
    check_database(unmigrated_postgres_url)
