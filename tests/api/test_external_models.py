"""Turns that an external model answers, over HTTP: the client's API, the record, and the failures."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.turns.plan import ReplyPlan
from proxy.turns.planner import Planner
from tests import databases
from tests.engines.pools import wires
from tests.logs import fields_of
from tests.support import Server, default_url, sampled, says, serving, user
from tests.upstreams import KEY, FakeUpstream, Sent, Spoken, failed, fake_upstream, streamed
from tokengrove.client import AsyncClient
from tokengrove.options.model import UpstreamApi

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = ("call_1", "weather", ('{"city"', ': "Rome"}'))


@asynccontextmanager
async def judged(folder: Path, api: str = "chat", **table: Any) -> AsyncIterator[tuple[Server, FakeUpstream]]:
    """A server with a policy and an external judge."""
    async with fake_upstream() as upstream:
        judge = {"kind": "external", "url": upstream.url, "api": api, "key": KEY, "upstream_model": "big", **table}
        tables = {"policy": {}, "judge": judge}
        models = json.dumps(tables)
        async with serving(folder, says(*["one"] * 9), models=models, model_hosts="127.0.0.1") as server:
            yield server, upstream


async def turns(server: Server) -> list[Any]:
    return (await server.http.get("/rl/sessions/s")).json()["interactions"]


async def events(server: Server, path: str, body: Any) -> str:
    response = await server.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    return response.text


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_each_api_gets_the_answer_of_each_kind_of_external_model(tmp_path: Path, api: str) -> None:
    async with judged(tmp_path, api) as (server, upstream):
        chat = (await server.post("/s/v1/chat/completions", {"model": "judge", "messages": [user("hi")]})).json()
        assert chat["choices"][0]["message"]["content"] == "fine"
        assert chat["model"] == "judge"
        usage = chat["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (11, 7, 18)
        message = (
            await server.post("/s/v1/messages", {"model": "judge", "max_tokens": 9, "messages": [user("hi")]})
        ).json()
        assert message["content"] == [{"type": "text", "text": "fine"}]
        assert message["usage"]["output_tokens"] == 7
        response = (await server.post("/s/v1/responses", {"model": "judge", "input": "hi"})).json()
        assert response["output"][-1]["content"][0]["text"] == "fine"
        assert response["usage"]["output_tokens"] == 7
        assert {asked.body["model"] for asked in upstream.asked} == {"big"}
        assert server.engine.requests == []


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_calls_are_streamed_in_the_clients_api(tmp_path: Path, api: str) -> None:
    async with judged(tmp_path, api) as (server, upstream):
        tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
        upstream.answers.append(Spoken("", calls=(CALL,)))
        text = await events(
            server, "/s/v1/chat/completions", {"model": "judge", "messages": [user("hi")], "tools": tools}
        )
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        calls = [
            call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())
        ]
        assert calls[0]["function"]["name"] == "weather"
        assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Rome"}
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        told = (await turns(server))[0]
        assert told["finish_reason"] == "tool_calls"


async def test_an_external_turn_is_recorded_without_tokens_and_never_trained(tmp_path: Path) -> None:
    async with judged(tmp_path) as (server, _):
        await server.post("/s/v1/chat/completions", {"model": "policy", "messages": [user("hi")]})
        await server.post("/s/v1/chat/completions", {"model": "judge", "messages": [user("rate it")]})
        policy, judge = await turns(server)
        assert judge["route_kind"] == "external"
        assert judge["notes"]["external"] == {
            "model": "judge-2026",
            "prompt_tokens": 11,
            "completion_tokens": 7,
            "cached_tokens": 3,
            "reasoning_tokens": 2,
        }
        assert (judge["prompt_tokens"], judge["output_tokens"], judge["trainable"]) == (0, 0, False)
        shown = (await server.http.get(f"/rl/sessions/s/interactions/{judge['id']}?include=messages,reply")).json()
        assert shown["output"]["content"] == "fine"
        assert shown["reply"]["choices"][0]["message"]["content"] == "fine"
        assert policy["route"] == "policy"


async def test_a_conversation_with_an_external_model_continues_its_own_turns(tmp_path: Path) -> None:
    async with judged(tmp_path) as (server, upstream):
        body: dict[str, Any] = {"model": "judge", "messages": [user("a")]}
        first = (await server.post("/s/v1/chat/completions", body)).json()["choices"][0]["message"]
        body["messages"] += [first, user("b")]
        await server.post("/s/v1/chat/completions", body)
        one, two = await turns(server)
        assert (two["parent_id"], two["reason"], two["aligned"]) == (one["id"], "continued", False)
        assert [message["content"] for message in upstream.asked[-1].body["messages"]] == ["a", "fine", "b"]


async def test_a_retry_gets_the_stored_answer_and_the_external_model_is_not_asked_again(tmp_path: Path) -> None:
    async with judged(tmp_path) as (server, upstream):
        body = {"model": "judge", "messages": [user("a")]}
        marked = {"idempotency-key": "one"}
        replies = [await server.http.post("/s/v1/chat/completions", json=body, headers=marked) for _ in range(2)]
        assert len(upstream.asked) == 1
        assert replies[0].json()["choices"] == replies[1].json()["choices"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (failed(429, {"error": {"message": "slow down"}}, retry_after="7"), 429),
        (failed(500, {"error": {"message": "broken"}}), 502),
        (failed(401, {"error": {"message": "bad key"}}), 502),
        (Sent((b"data: {]\n\n",)), 502),
    ],
)
async def test_the_failure_of_an_external_model_is_passed_on_and_recorded(
    tmp_path: Path, sent: Sent, status: int
) -> None:
    async with judged(tmp_path) as (server, upstream):
        upstream.answers.append(sent)
        response = await server.post("/s/v1/chat/completions", {"model": "judge", "messages": [user("a")]})
        assert (response.status_code, response.json()["error"]["code"]) == (status, "upstream_failed")
        (turn,) = await turns(server)
        assert (turn["status"], turn["route"]) == ("failed", "judge")
        assert server.engine.requests == [], "no other route answers instead"
        assert KEY not in response.text


async def test_what_an_external_model_cannot_give_is_refused_by_name(tmp_path: Path) -> None:
    async with judged(tmp_path) as (server, upstream):
        for path, body, param in (
            ("/s/v1/chat/completions", {"messages": [user("a")], "logprobs": True}, "logprobs"),
            ("/s/v1/chat/completions", {"messages": [user("a")], "n": 2}, "n"),
            ("/s/v1/completions", {"prompt": [1, 2, 3]}, "prompt"),
            ("/s/v1/generate", {"input_ids": [1, 2, 3]}, "input_ids"),
            ("/s/v1/messages/count_tokens", {"messages": [user("a")]}, "model"),
            ("/s/v1/tokenize", {"messages": [user("a")]}, "model"),
        ):
            response = await server.post(path, {"model": "judge", **body})
            assert response.status_code == 400, (path, response.text)
            assert param in response.text, (path, response.text)
        assert upstream.asked == []


async def test_the_limits_of_a_route_hold_for_it_alone(tmp_path: Path) -> None:
    async with judged(tmp_path, max_turns=1) as (server, upstream):
        for _ in range(2):
            last = await server.post("/s/v1/chat/completions", {"model": "judge", "messages": [user("a")]})
        assert (last.status_code, last.json()["error"]["param"]) == (403, "models.judge.max_turns")
        assert len(upstream.asked) == 1
        assert (
            await server.post("/s/v1/chat/completions", {"model": "policy", "messages": [user("a")]})
        ).status_code == 200


async def test_a_model_is_added_and_removed_over_http(tmp_path: Path) -> None:
    async with judged(tmp_path) as (server, upstream):
        table = {"name": "critic", "kind": "external", "url": upstream.url, "key": KEY, "upstream_model": "big"}
        added = await server.ok("/engine/models", table)
        assert [each["name"] for each in added["models"]] == ["policy", "judge", "critic"]
        assert KEY not in json.dumps(added)
        body = {"model": "critic", "messages": [user("a")]}
        assert (await server.ok("/s/v1/chat/completions", body))["choices"][0]["message"]["content"] == "fine"
        assert "critic" in [each["id"] for each in (await server.http.get("/v1/models")).json()["data"]]
        removed = await server.http.request("DELETE", "/engine/models", json={"name": "critic"})
        assert [each["name"] for each in removed.json()["models"]] == ["policy", "judge"]
        assert (await server.post("/s/v1/chat/completions", body)).status_code == 404
        shown = (await server.http.get("/rl/sessions/s?include=reply")).json()["interactions"][0]
        assert shown["reply"]["choices"][0]["message"]["content"] == "fine", "its turns can still be read"


@pytest.mark.parametrize(
    ("table", "param"),
    [
        ({"name": "critic", "kind": "external", "url": "http://169.254.169.254/v1"}, "url"),
        (
            {"name": "critic", "kind": "external", "url": "http://127.0.0.1:9/v1", "key_variable": "HOME"},
            "key_variable",
        ),
        ({"name": "critic", "kind": "policy", "engine": "http://127.0.0.1:9"}, "kind"),
        ({"name": "critic", "kind": "frozen", "engine": "scripted"}, "engine"),
        ({"name": "critic", "kind": "frozen", "engine": "http://169.254.169.254"}, "engine"),
        ({"name": "critic", "kind": "frozen", "engine": "http://127.0.0.1:9", "engine_arg": 3}, "engine_arg"),
        ({"name": "critic", "kind": "external", "url": "http://127.0.0.1:9/v1", "temprature": 1}, "temprature"),
        ({"name": "judge", "kind": "external", "url": "http://127.0.0.1:9/v1"}, "name"),
        ({"kind": "external", "url": "http://127.0.0.1:9/v1"}, "name"),
    ],
)
async def test_a_model_that_may_not_be_added_is_refused_by_field(
    tmp_path: Path, table: dict[str, Any], param: str
) -> None:
    async with judged(tmp_path) as (server, _):
        refused = await server.post("/engine/models", table)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


async def test_the_client_adds_lists_and_removes_models(tmp_path: Path) -> None:
    async with judged(tmp_path) as (server, upstream), AsyncClient(app=server.app) as client:
        added = await client.add_model("critic", kind="external", url=upstream.url)
        assert [each["name"] for each in added] == ["policy", "judge", "critic"]
        assert await client.models() == added
        assert [each["name"] for each in await client.remove_model("critic")] == ["policy", "judge"]
        assert (await client.engine(model="policy")).version == 0


@pytest.mark.parametrize("usage", [True, False])
async def test_tokens_of_an_external_model_count_for_the_limit_of_a_session(tmp_path: Path, usage: bool) -> None:
    async with judged(tmp_path) as (server, upstream):
        await server.ok("/rl/start_session", {"session_id": "s", "limits": {"max_total_tokens": 8}})
        upstream.answers.extend(Spoken("fine " * 6, usage=usage) for _ in range(3))
        body = {"model": "judge", "messages": [user("a")]}
        statuses = [(await server.post("/s/v1/chat/completions", body)).status_code for _ in range(3)]
        assert statuses in ([200, 200, 403], [200, 403, 403])
        assert (await server.post("/s/v1/chat/completions", body)).json()["error"]["param"] == "limits.max_total_tokens"


async def test_a_request_whose_model_is_removed_while_it_is_planned_is_not_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with judged(tmp_path) as (server, upstream):
        plan = Planner.of_external

        def removed(self: Planner, *given: Any) -> ReplyPlan:
            del server.app.state.turns.routes.externals["judge"]
            return plan(self, *given)

        monkeypatch.setattr(Planner, "of_external", removed)
        response = await server.post("/s/v1/chat/completions", {"model": "judge", "messages": [user("a")]})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert upstream.asked == []


async def test_a_broken_stream_of_an_external_model_breaks_the_clients_stream(tmp_path: Path) -> None:
    async with judged(tmp_path) as (server, upstream):
        for path, body in (
            ("/s/v1/chat/completions", {"messages": [user("a")]}),
            ("/s/v1/messages", {"messages": [user("a")], "max_tokens": 9}),
            ("/s/v1/responses", {"input": "a"}),
        ):
            whole = streamed(Spoken("half an answer"), UpstreamApi.CHAT)
            upstream.answers.append(replace(whole, pieces=whole.pieces[:2], whole=False))
            response = await server.post(path, {"model": "judge", "stream": True, **body})
            assert "breaks off: RemoteProtocolError" in response.text, path
            for end in ('"finish_reason":"stop"', "message_stop", "response.completed"):
                assert end not in response.text, path
        assert {turn["status"] for turn in await turns(server)} == {"failed"}


async def test_the_key_of_an_external_model_is_in_no_database_and_no_audit_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with judged(tmp_path) as (server, upstream):
        await server.ok("/engine/models", {"name": "critic", "kind": "external", "url": upstream.url, "key": KEY})
        for model in ("judge", "critic"):
            await server.post("/s/v1/chat/completions", {"model": model, "messages": [user("a")]})
        shown = (await server.http.get("/rl/sessions/s/interactions/1?include=messages,reply,request")).text
        metrics = (await server.http.get("/metrics")).text
    assert upstream.asked[-1].headers["authorization"] == f"Bearer {KEY}"
    written = databases.contents(default_url(tmp_path))
    assert b"critic" in written and b'"content":"a"' in written and KEY.encode() not in written
    assert '"messages"' in shown and "critic" in shown and KEY not in shown + metrics
    assert [line["action"] for line in fields_of(caplog, "audit")] == ["engine.models.add"]
    assert not any(KEY in str(vars(record)) for record in caplog.records if record.name.startswith("proxy"))


async def test_the_answer_of_an_external_model_is_context_of_the_policy(tmp_path: Path) -> None:
    async with judged(tmp_path) as (server, _):
        judge = (await server.ok("/s/v1/chat/completions", {"model": "judge", "messages": [user("a")]}))["choices"][0]
        talk = [user("a"), judge["message"], user("b")]
        await server.ok("/s/v1/chat/completions", {"model": "policy", "messages": talk})
        await server.ok("/s/rl/end_session", {})
        (sample,) = await server.export(include=["messages"])
        (turn,) = sample["turns"]
        assert judge["message"]["content"] in json.dumps(turn["messages"])
        assert sum(sample["loss_mask"]) == len(sampled("one"))


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_frozen_model_is_added_with_its_servers_and_removed(tmp_path: Path, kind: str) -> None:
    async with judged(tmp_path) as (server, _), wires(1, kind=kind) as (wire,):
        table = {"name": "old", "kind": "frozen", "engine": wire.url, "engine_arg": ["check_model=false"]}
        added = await server.ok("/engine/models", table)
        assert added["models"][-1]["engine"] == wire.url
        answer = await server.post("/s/v1/chat/completions", {"model": "old", "messages": [user("a")], "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        assert (await turns(server))[0]["route_kind"] == "frozen"
        removed = await server.http.request("DELETE", "/engine/models", json={"name": "old"})
        assert [each["name"] for each in removed.json()["models"]] == ["policy", "judge"]
