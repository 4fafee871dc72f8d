"""A reader's key lists, shows and exports what the admin key does. It changes nothing, and opens nothing to agents."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from proxy.app import build_app
from proxy.settings import Settings
from tests.databases import execute
from tests.support import Server, says, serving, user
from tokengrove.errors import ConfigurationError

KEYS = {"admin_key": "admin-key-0123456789", "reader_key": "reader-key-0123456789,next-reader-key-012345"}
ADMIN = {"authorization": f"Bearer {KEYS['admin_key']}"}
READER = {"authorization": "Bearer reader-key-0123456789"}
NEXT = {"authorization": "Bearer next-reader-key-012345"}

READS = {
    "GET /engine",
    "GET /engine/models",
    "GET /engine/adapters",
    "GET /engine/servers",
    "GET /rl/events",
    "GET /rl/groups",
    "GET /rl/reasons",
    "GET /rl/runs",
    "GET /rl/sessions",
    "GET /rl/sessions/{session:path}",
    "GET /rl/sessions/{session:path}/annotations",
    "GET /rl/sessions/{session:path}/images/{digest}",
    "GET /rl/sessions/{session:path}/interactions/{interaction}",
    "GET /rl/statistics",
    "GET /trajectories/mismatch",
    "GET /trajectories/steps",
    "GET /trajectories/steps/{trainer}/{step}",
    "POST /export_trajectories",
    "POST /trajectories/export",
}
KEYLESS = re.compile(r"GET /(health|ready|metrics|ui.*|)$|GET (?!/engine).*/models(/.*)?$")
IN_PATHS = {"session:path": "s", "interaction": "0", "digest": "0" * 64, "trainer": "t", "step": "1"}


async def played(server: Server, name: str = "s") -> None:
    """One turn of a session that has ended."""
    await server.ok("/rl/start_session", {"session_id": name}, headers=ADMIN)
    await server.ok(f"/{name}/v1/chat/completions", {"messages": [user("a")]}, headers=ADMIN)
    await server.ok(f"/{name}/rl/end_session", {"reward": 1.0}, headers=ADMIN)


def calls(folder: Path) -> Iterable[tuple[str, str]]:
    """The method and path of every route."""
    app = build_app(Settings(engine="scripted", database_url=f"sqlite:///{folder / 'routes.db'}"))
    for route in app.routes:
        assert isinstance(route, Route)
        assert route.methods is not None
        for method in route.methods - {"HEAD"}:
            yield method, route.path


def at(path: str) -> str:
    return re.sub(r"\{([^}]+)\}", lambda found: IN_PATHS.get(found[1], "m"), path)


async def test_a_readers_key_is_refused_by_name_everywhere_but_where_something_is_read(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["one"] * 3), **KEYS) as server:
        await played(server)
        wrong, seen = [], set()
        for method, path in calls(tmp_path):
            call = f"{method} {path}"
            if KEYLESS.fullmatch(call) or call == "GET /rl/events":  # a stream
                continue
            given = {} if method == "GET" else {"json": {"messages": [user("a")]} if "/v1" in path else {}}
            answer = await server.http.request(method, at(path), headers=READER, **given)
            refused = answer.status_code == 403 and "(--reader-key)" in answer.text  # the APIs differ in codes
            seen.add(call)
            if refused == (call in READS) or answer.status_code == 401:
                wrong.append((call, answer.status_code, answer.text[:120]))
        assert not wrong
        assert seen >= READS - {"GET /rl/events"}
        of_none = await server.http.get("/rl/events?events=none", headers=READER)
        assert of_none.status_code == 400, "the key was taken; a stream of real events does not end"


async def test_what_a_reader_sees_is_what_the_administrator_sees_and_has_no_key(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["one"] * 3), **KEYS) as server:
        started = await server.ok("/rl/start_session", {"session_id": "s"}, headers=ADMIN)
        await server.ok("/s/v1/chat/completions", {"messages": [user("a")]}, headers=ADMIN)
        secrets = [started["api_key"], started["control_key"], started["base_url"].partition("~")[2].partition("/")[0]]
        assert all(secrets)
        for path in ("/rl/sessions?include=summary", "/rl/sessions/s", "/rl/groups", "/engine"):
            shown = [await server.http.get(path, headers=headers) for headers in (READER, NEXT, ADMIN)]
            assert [answer.status_code for answer in shown] == [200] * 3, path
            assert not any(secret in shown[0].text for secret in [*secrets, *",".join(KEYS.values()).split(",")])
        one = await server.http.get("/rl/sessions/s", headers=READER)
        assert one.json() == (await server.http.get("/rl/sessions/s", headers=ADMIN)).json()


async def test_an_export_of_a_reader_and_an_outline_are_no_delivery_to_a_trainer(
    tmp_path: Path, database_url: str
) -> None:
    """Retention keeps a session until it was exported."""
    async with serving(tmp_path, says(*["one"] * 3), database_url=database_url, **KEYS) as server:
        await played(server)

        async def samples(headers: dict[str, str], **options: Any) -> int:
            body = {"session_ids": ["s"], **options}
            return len((await server.ok("/trajectories/export", body, headers=headers))["samples"])

        assert await samples(READER) == 1
        assert await samples(ADMIN, outline=True) == 1
        await played(server, "later")  # notes are written in order, so one of the exports above would be there
        assert exported_at(database_url) == {"s": None, "later": None}
        await samples(ADMIN)
        await played(server, "last")
        assert exported_at(database_url)["s"] is not None


def exported_at(database_url: str) -> dict[str, float | None]:
    return {name: at for name, at in execute(database_url, "SELECT session_id, exported_at FROM sessions")}


async def test_a_reader_makes_no_engine_score_samples(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["one"] * 3), **KEYS) as server:
        await played(server)
        refused = await server.post(
            "/trajectories/export", {"teachers": [{"name": "ref", "model": "m"}]}, headers=READER
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "read_only_key")


@pytest.mark.parametrize(
    ("keys", "way_out"),
    [
        ({"reader_key": "r" * 20}, "--reader-key needs --admin-key"),
        ({"admin_key": "a" * 20, "reader_key": f"{'r' * 20},{'a' * 20}"}, "--reader-key has a key of --admin-key"),
        ({"admin_key": "a" * 20, "trainer_key": "a" * 20}, "--trainer-key has a key of --admin-key"),
        ({"admin_key": "a" * 20, "reader_key": ""}, "--reader-key is empty"),
    ],
)
def test_a_readers_key_that_would_permit_more_than_reading_stops_the_start(keys: dict[str, str], way_out: str) -> None:
    with pytest.raises(ConfigurationError, match=way_out):
        Settings(engine="scripted", **keys)
