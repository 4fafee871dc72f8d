"""On a keyed server, each route is listed as public, or refuses a missing key, a wrong one and another session's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from proxy.engine.interface import WeightTransfer
from tests.support import Server, says, serving, user

ADMIN = "the-admin-key"
# Public routes: health, readiness, metrics, the model's name, and the page's files. None reveals a session.
PUBLIC = {"/health", "/ready", "/metrics", "/", "/ui", "/ui/", "/ui/{file:path}"} | {
    prefix + path
    for prefix in ("/v1", "/{session:path}/v1", "/{session:path}", "")
    for path in ("/models", "/models/{model:path}")
}
PUBLIC |= {f"{prefix}/v1beta/models{model}" for prefix in ("", "/{session:path}") for model in ("", "/{model:path}")}


def routes(server: Server) -> list[tuple[str, str]]:
    """The path and method of every route."""
    found = []
    for route in server.app.routes:
        assert isinstance(route, Route), f"{route} is of a kind that this test does not know"
        found += [(route.path, method) for method in route.methods or () if method != "HEAD"]
    return found


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def started(server: Server, session: str) -> Any:
    return await server.ok("/rl/start_session", {"task_id": "t", "session_id": session}, headers=bearer(ADMIN))


async def test_every_route_is_listed_as_public_or_needs_a_key(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), admin_key=ADMIN) as server:
        mine, other = await started(server, "mine"), await started(server, "other")
        strangers: list[dict[str, str]] = [{}, bearer("wrong"), {"x-api-key": "wrong"}, bearer("")]
        others = [bearer(other["api_key"]), bearer(other["control_key"]), {"x-api-key": other["control_key"]}]
        seen = 0
        for template, method in routes(server):
            path = template.replace("{session:path}", "mine").replace("{model:path}", "x")
            # Without a session in the path, another session's key addresses that session.
            keys = strangers + (others if "{session" in template or template in ADMINS else [])
            for headers in keys:
                body = {"content": b"\xff not JSON"} if method == "POST" else {}  # refused before it is read
                response = await server.http.request(method, path, headers=headers, **body)
                if template in PUBLIC:
                    assert response.status_code in (200, 308, 404), (template, response.text)
                else:
                    assert response.status_code in (401, 403), (template, method, headers, response.text)
                    assert mine["api_key"] not in response.text
                seen += 1
        assert seen > 100


ADMINS = {
    "/rl/grant_capacity", "/grant_capacity", "/rl/start_session", "/trajectories/export", "/export_trajectories",
    "/rl/reasons", "/rl/statistics", "/rl/events", "/rl/groups", "/rl/runs", "/rl/sessions",
    "/rl/webhooks", "/rl/webhooks/resend",
    "/rl/sessions/{session:path}",
    "/rl/sessions/{session:path}/interactions/{interaction}", "/rl/sessions/{session:path}/images/{digest}",
    "/rl/sessions/{session:path}/annotations", "/trajectories/annotate", "/trajectories/mismatch",
    "/trajectories/steps", "/trajectories/steps/{trainer}/{step}",
    "/trajectories/claim", "/trajectories/acknowledge", "/mailbox/next", "/mailbox/deliver", "/engine",
    "/engine/pause_generation", "/engine/continue_generation", "/engine/update_weights", "/engine/flush_cache",
    "/engine/release_memory", "/engine/resume_memory", "/engine/servers", "/engine/adapters", "/engine/models",
    *("/v1/logprobs", *(f"/engine/{step}" for step in WeightTransfer)),
}  # fmt: skip
GOOGLE = ("generateContent", "streamGenerateContent", "countTokens")
# A session's own key or path gives access to these.
OWN = {
    *("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/generate"),
    *("/v1/responses/input_tokens", "/v1/completions", "/v1/tokenize", "/v1/detokenize", "/v1/parse"),
    *(f"/v1/models/{{model:path}}:{method}" for method in GOOGLE),
    *("/rl/set_reward", "/rl/end_session", "/rl/rotate_keys", "/rl/mark", "/rl/withdraw_session"),
}


async def test_every_route_is_public_or_for_the_administrator_or_for_a_session(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        known = PUBLIC | ADMINS | OWN
        for template, method in routes(server):
            bare = template.removeprefix("/{session:path}")
            bare = bare.replace("/v1beta/", "/v1/").replace("/v1alpha/", "/v1/")
            assert template in known or bare in OWN or f"/v1{bare}" in OWN, (template, method)
        there = {template for template, _ in routes(server)}
        assert known <= there, known - there
        for path in OWN:
            assert f"/{{session:path}}{path}" in there


async def test_a_session_key_gives_access_only_to_its_turns_and_keys(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), admin_key=ADMIN) as server:
        mine = await started(server, "mine")
        for path in sorted(OWN):
            for prefix in ("", "/mine"):
                response = await server.post(prefix + path, ["no object"], headers=bearer(mine["control_key"]))
                assert response.status_code == 400, (
                    prefix + path,
                    response.text,
                )  # authorised, but a bad body


async def test_routes_of_the_administrator_refuse_session_keys(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), admin_key=ADMIN) as server:
        mine = await started(server, "mine")
        for template, method in routes(server):
            if template in ADMINS:
                path = template.replace("{session:path}", "mine")
                for key in (mine["api_key"], mine["control_key"]):
                    response = await server.http.request(method, path, headers=bearer(key))
                    assert response.status_code == 403, (template, response.text)


async def test_errors_do_not_reveal_whether_a_session_exists(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), admin_key=ADMIN) as server:
        await started(server, "there")
        for path in ("v1/chat/completions", "v1/responses", "v1/messages", "rl/set_reward", "rl/end_session"):
            answers = [await server.post(f"/{name}/{path}", {}, headers=bearer("x")) for name in ("there", "not-there")]
            assert answers[0].status_code == answers[1].status_code == 401
            texts = [a.json()["error"]["message"].replace("not-there", "there") for a in answers]
            assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "path",
    [
        "/mine/v1/other/v1/chat/completions", "//mine/v1/chat/completions", "/mine//v1/chat/completions",
        "/mine/../other/v1/chat/completions", "/%6dine/v1/chat/completions", "/mine%2Fv1/chat/completions",
        "/mine~/v1/chat/completions", "/mine~wrong/v1/chat/completions", "/~/v1/chat/completions",
        "/mine/v1/chat/completions/", "/MINE/v1/chat/completions", "/mine/v1/chat/completions?api_key=the-admin-key",
        "/mine/v1/chat/completions?key=the-admin-key", "/rl/v1/chat/completions", "/v1/v1/chat/completions",
    ],
)  # fmt: skip
async def test_no_spelling_of_a_path_bypasses_the_key(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, says("no"), admin_key=ADMIN) as server:
        await started(server, "mine")
        response = await server.post(path, {"model": "m", "messages": [user("hi")]})
        assert response.status_code in (307, 400, 401, 404), response.text
        assert server.engine.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Basic dGhlLWFkbWluLWtleQ=="},
        {"authorization": ADMIN},
        {"authorization": f"Bearer{ADMIN}"},
        {"authorization": f"Bearer {ADMIN} x"},
        {"authorization": "Bearer wrong", "x-api-key": ADMIN},
        {"cookie": f"api_key={ADMIN}"},
        {"x-http-method-override": "GET"},
        {"x-forwarded-for": "127.0.0.1"},
    ],
)
async def test_a_key_is_read_only_from_bearer_or_api_key_headers(tmp_path: Path, headers: dict[str, str]) -> None:
    async with serving(tmp_path, says(), admin_key=ADMIN) as server:
        response = await server.http.get("/rl/sessions", headers=headers)
        assert response.status_code in (401, 403), response.text


async def test_lower_case_bearer_and_api_key_header_are_keys(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), admin_key=ADMIN) as server:
        for headers in ({"authorization": f"bearer {ADMIN}"}, {"x-api-key": ADMIN}):
            assert (await server.http.get("/rl/sessions", headers=headers)).status_code == 200


async def test_a_session_cannot_be_continued_by_ids_of_another(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two"), admin_key=ADMIN) as server:
        mine, other = await started(server, "mine"), await started(server, "other")
        first = await server.ok("/v1/responses", {"model": "m", "input": "hi"}, headers=bearer(mine["api_key"]))
        body = {"model": "m", "input": "go on", "previous_response_id": first["id"]}
        refused = await server.post("/v1/responses", body, headers=bearer(other["api_key"]))
        assert refused.status_code in (400, 404)
        assert (await server.ok("/v1/responses", body, headers=bearer(mine["api_key"])))["id"]
