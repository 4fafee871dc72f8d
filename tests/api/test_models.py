"""Several models behind one address: which route serves a request, and what it records."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from proxy.app import check
from proxy.rendering.renderer import Renderer, load_renderer
from proxy.settings import Settings
from tests.support import Server, call_text, says, serving, tiny_renderer, until, user
from tokengrove.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
QWEN3 = Path(os.environ.get("TOKENGROVE_TEST_ASSETS", ROOT.parent / "shared")) / "tokenizers" / "qwen3"
TABLES: dict[str, Any] = {
    "policy": {},
    "opponent": {"kind": "frozen", "engine": "scripted"},
    "critic": {"kind": "policy", "engine": "scripted", "restricted": True},
}


@asynccontextmanager
async def several(folder: Path, tables: dict[str, Any] = TABLES, *answers: str) -> AsyncIterator[Server]:
    def load(settings: Settings, source: Path) -> Renderer:
        # The self-check of a template takes longer than a test.
        return load_renderer(settings, source) if settings.tokenizer else tiny_renderer()

    with mock.patch("proxy.served_engines.load_renderer", load):
        async with serving(folder, says(*(answers or ["one"] * 9)), models=json.dumps(tables)) as server:
            yield server


async def asked(server: Server, model: str, messages: list[Any], session: str = "s") -> Any:
    return await server.post(f"/{session}/v1/chat/completions", {"model": model, "messages": messages})


async def turns(server: Server, session: str = "s") -> list[Any]:
    return (await server.http.get(f"/rl/sessions/{session}")).json()["interactions"]


async def test_a_name_is_served_by_its_route_and_a_turn_says_which(tmp_path: Path) -> None:
    async with several(tmp_path) as server:
        for model in ("policy", "opponent"):
            response = await asked(server, model, [user("hello")])
            assert response.status_code == 200, response.text
            assert response.json()["model"] == model
        found = [(turn["route"], turn["route_kind"]) for turn in await turns(server)]
        assert found == [("policy", "policy"), ("opponent", "frozen")]


@pytest.mark.parametrize("model", ["Policy", "polcy", "opponent@3", "gpt-4.1", "policy@", "critic"])
async def test_another_name_is_not_found_in_the_words_of_each_api(tmp_path: Path, model: str) -> None:
    async with several(tmp_path) as server:
        chat = await asked(server, model, [user("hello")])
        assert (chat.status_code, chat.json()["error"]["code"]) == (404, "model_not_found")
        body = {"model": model, "max_tokens": 5, "messages": [user("hello")]}
        messages = await server.post("/s/v1/messages", body)
        assert (messages.status_code, messages.json()["error"]["type"]) == (404, "not_found_error")
        responses = await server.post("/s/v1/responses", {"model": model, "input": "hello"})
        assert (responses.status_code, responses.json()["error"]["code"]) == (404, "model_not_found")
        for path in (f"/v1/models/{model}", f"/s/v1/models/{model}"):
            shown = await server.http.get(path)
            assert (shown.status_code, shown.json()["error"]["code"]) == (404, "model_not_found")
        for path, asks in (("completions", {"prompt": "hello"}), ("generate", {"input_ids": [1, 2]})):
            assert (await server.post(f"/s/v1/{path}", {"model": model, **asks})).status_code == 404
        assert server.engine.requests == [], "no request reached the engine"


async def test_a_turn_continues_turns_of_its_own_route_only(tmp_path: Path) -> None:
    async with several(tmp_path) as server:
        first = (await asked(server, "policy", [user("a")])).json()["choices"][0]["message"]
        talk = [user("a"), first, user("b")]
        second = (await asked(server, "opponent", talk)).json()["choices"][0]["message"]
        await asked(server, "policy", [*talk, second, user("c")])
        found = await turns(server)
        assert [turn["parent_id"] for turn in found] == [None, None, found[0]["id"]]
        assert [turn["aligned"] for turn in found] == [False, False, True]
        assert [turn["reason"] for turn in found] == ["first", "new_root", "continued"]


async def test_a_session_binds_names_to_routes(tmp_path: Path) -> None:
    async with several(tmp_path) as server:
        bound = {"*": "policy", "claude-*-haiku": "opponent", "critic": "critic"}
        started = await server.post("/rl/start_session", {"session_id": "s", "models": bound})
        assert started.status_code == 200, started.text
        for model in ("gpt-4.1", "claude-4-haiku", "critic", ""):
            response = await asked(server, model, [user("hello")])
            assert response.status_code == 200, response.text
        routes = [turn["route"] for turn in await turns(server)]
        assert routes == ["policy", "opponent", "critic", "policy"]
        listed = (await server.http.get("/s/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["policy", "opponent", "critic"]
        assert (await server.http.get("/s/v1/models/claude-4-haiku")).json()["display_name"] == "opponent"


async def test_models_lists_the_routes_that_are_open_to_all(tmp_path: Path) -> None:
    async with several(tmp_path) as server:
        listed = (await server.http.get("/v1/models")).json()
        assert [(each["id"], each["kind"]) for each in listed["data"]] == [("policy", "policy"), ("opponent", "frozen")]
        assert (listed["first_id"], listed["last_id"]) == ("policy", "opponent")


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ({"*": "polcy"}, "'models.*': the model 'polcy' does not exist; this server has policy, opponent"),
        ({"judge": 3}, "models"),
        ({"judge": "http://127.0.0.1:9/v1"}, "does not exist"),
        ({"*": "opponent@3"}, "has no adapters"),
    ],
)
async def test_a_session_cannot_be_bound_to_a_route_that_does_not_exist(
    tmp_path: Path, bound: dict[str, Any], said: str
) -> None:
    async with several(tmp_path) as server:
        response = await server.post("/rl/start_session", {"session_id": "s", "models": bound})
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]


async def test_without_a_table_names_cannot_be_bound_and_every_name_is_served(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one")) as server:
        refused = await server.post("/rl/start_session", {"session_id": "s", "models": {"*": "policy"}})
        assert refused.status_code == 400
        assert "declares none (--models)" in refused.json()["error"]["message"]
        assert (await asked(server, "anything", [user("hello")])).status_code == 200
        assert "route" not in (await turns(server))[0]


@pytest.mark.skipif(not QWEN3.is_dir(), reason=f"{QWEN3} is not there (TOKENGROVE_TEST_ASSETS)")
@pytest.mark.wide
async def test_each_route_has_the_tokenizer_and_the_template_of_its_model(tmp_path: Path) -> None:
    tables = {"policy": {}, "other": {"kind": "frozen", "engine": "scripted", "tokenizer": str(QWEN3)}}
    async with several(tmp_path, tables) as server:
        talk = [user("héllo wörld")]
        for model in tables:
            await asked(server, model, talk)
        counted = [
            (await server.post("/s/v1/messages/count_tokens", {"model": model, "messages": talk})).json()
            for model in tables
        ]
        found = await turns(server)
        assert [each["input_tokens"] for each in counted] == [turn["prompt_tokens"] for turn in found]
        assert counted[0] != counted[1]
        for turn, model in zip(found, tables, strict=True):
            shown = (await server.http.get(f"/rl/sessions/s/interactions/{turn['id']}?include=ids,reply,tokens")).json()
            assert shown["reply"]["choices"][0]["message"]["content"]
            body = {"model": model, "tokens": shown["prompt_ids"]}
            text = (await server.post("/s/v1/detokenize", body)).json()["prompt"]
            assert "héllo wörld" in text
            spelt = shown["tokens"]["texts"][: len(shown["prompt_ids"])]
            assert "".join(spelt) == text, "tokens are spelt by their own tokenizer"


async def test_an_engine_is_administered_by_the_name_of_its_route(tmp_path: Path) -> None:
    async with several(tmp_path, {"policy": {}, "opponent": {"kind": "frozen", "engine": "scripted"}}) as server:
        assert (await server.http.get("/engine")).json()["route"] == "policy"
        opponent = (await server.http.get("/engine?model=opponent")).json()
        assert (opponent["route"], opponent["kind"]) == ("opponent", "frozen")
        paused = await server.post("/engine/pause_generation?model=opponent", {})
        assert paused.json()["paused"] == "abort"
        assert (await asked(server, "policy", [user("hello")])).status_code == 200
        waits = asyncio.create_task(asked(server, "opponent", [user("hello")]))
        gate = server.app.state.turns.routes.engine("opponent").gate
        await until(lambda: gate.waiting == 1)
        assert (await server.post("/engine/continue_generation?model=opponent", {})).json()["paused"] is None
        assert (await waits).status_code == 200
        refused = await server.post("/engine/update_weights?model=opponent", {"path": "/weights"})
        assert refused.status_code == 501
        assert "frozen: its weights never change" in refused.json()["error"]["message"]
        for step, fields in (("update_weights_from_tensor", {}), ("update_weights", {"update_info": {}})):
            assert (await server.post(f"/engine/{step}?model=opponent", fields)).status_code == 501
        adapter = await server.post("/engine/adapters", {"name": "opponent", "path": "/adapters/1"})
        assert (adapter.status_code, adapter.json()["error"]["param"]) == (404, "name")
        unknown = await server.post("/engine/update_weights?model=oponent", {"path": "/weights"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "model")


async def test_with_several_trained_models_an_update_names_one(tmp_path: Path) -> None:
    async with several(tmp_path) as server:
        refused = await server.post("/engine/update_weights", {"path": "/weights"})
        assert refused.status_code == 400
        assert "name one with ?model=" in refused.json()["error"]["message"]
        await server.ok("/engine/update_weights?model=critic", {"path": "/weights", "version": 7})
        await server.ok("/rl/start_session", {"session_id": "s", "models": {"critic": "critic"}})
        for model in ("policy", "critic"):
            await asked(server, model, [user("hello")])
        versions = [turn["versions"][0][1] for turn in await turns(server)]
        assert versions == [0, 7], "versions count per route"
        counted = (await server.http.get("/rl/statistics")).json()["turns_by_route"]
        assert counted == {"policy": 1, "critic": 1}


@pytest.mark.skipif(not QWEN3.is_dir(), reason=f"{QWEN3} is not there (TOKENGROVE_TEST_ASSETS)")
@pytest.mark.wide
async def test_the_text_of_a_sample_is_decoded_by_the_tokenizer_of_its_route(tmp_path: Path) -> None:
    tables = {"policy": {}, "other": {"kind": "policy", "engine": "scripted", "tokenizer": str(QWEN3)}}
    async with several(tmp_path, tables) as server:
        for model in tables:
            await asked(server, model, [user("héllo wörld")])
        await server.ok("/s/rl/end_session", {})
        for model in tables:
            body = {"session_ids": ["s"], "route": model, "format": "json", "include": ["text"]}
            (sample,) = (await server.ok("/trajectories/export", body))["samples"]
            assert (sample["route"], "héllo wörld" in json.dumps(sample, ensure_ascii=False)) == (model, True)


async def test_the_limits_of_a_route_count_running_turns_and_cap_the_last_one(tmp_path: Path) -> None:
    tables = {"policy": {}, "opponent": {"kind": "frozen", "engine": "scripted", "max_turns": 2}}
    async with several(tmp_path, tables) as server:
        replies = await asyncio.gather(*(asked(server, "opponent", [user(f"{n}")]) for n in range(6)))
        assert sorted(reply.status_code for reply in replies) == [200, 200, 403, 403, 403, 403]
    tables = {"policy": {}, "opponent": {"kind": "frozen", "engine": "scripted", "max_total_tokens": 9}}
    async with several(tmp_path, tables) as server:
        statuses = [(await asked(server, "opponent", [user(f"{n}")], "t")).status_code for n in range(12)]
        assert statuses == sorted(statuses) and set(statuses) == {200, 403}
        assert sum(turn["output_tokens"] for turn in await turns(server, "t")) == 9


async def test_a_pattern_binds_the_route_and_not_the_version(tmp_path: Path) -> None:
    async with several(tmp_path) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "models": {"*": "policy"}})
        refused = await asked(server, "policy@1", [user("hello")])
        assert refused.status_code == 404
        assert "version 1" in refused.json()["error"]["message"]


async def test_a_text_to_tokenize_needs_a_model_that_exists(tmp_path: Path) -> None:
    async with several(tmp_path) as server:
        assert (await server.post("/v1/tokenize", {"model": "polcy", "prompt": "hello"})).status_code == 404
        assert (await server.post("/v1/tokenize", {"model": "policy", "prompt": "hello"})).status_code == 200


async def test_with_several_trained_models_an_adapter_names_one(tmp_path: Path) -> None:
    async with several(tmp_path) as server:
        refused = await server.post("/engine/adapters", {"path": "/adapters/1"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"policy": {}, "f": {"kind": "frozen", "max_tokens_per_turn": 5}}, "give `engine` or `model` too"),
        ({"policy": {}, "j": {"kind": "external", "url": "http://[::1/v1"}}, "models.j.url is no valid URL"),
        ({"policy": {}, "f": {"kind": "frozen", "engine": "scriptd"}}, "models.f: --engine scriptd is unknown"),
        ({"policy": {}, "f": {"kind": "frozen", "engine": "http://a:1"}, "g": {"engine": "http://a:1/"}}, "its own"),
        ({"policy": {}, "other": {}}, "exactly one table"),
        ({"policy": {}, "f": {"kind": "frozen", "engine": "http://server:1"}}, "has too (http://server:1)"),
        ({"policy": {}, "f": {"kind": "frozen", "model": "/weights"}}, "models.f names no `engine`"),
        ({"policy": {"kidn": "frozen"}}, "did you mean kind?"),
    ],
)
def test_a_wrong_table_stops_the_start_and_is_named(tmp_path: Path, tables: dict[str, Any], said: str) -> None:
    engine = "http://server:1" if "server" in json.dumps(tables) or "/weights" in json.dumps(tables) else "scripted"
    settings = Settings(engine=engine, database_url=f"sqlite:///{tmp_path / 't.db'}", models=json.dumps(tables))
    with pytest.raises(ConfigurationError) as error:
        check(settings)
    assert said in str(error.value)


@pytest.mark.skipif(not QWEN3.is_dir(), reason=f"{QWEN3} is not there (TOKENGROVE_TEST_ASSETS)")
@pytest.mark.wide
async def test_the_echo_of_ids_is_the_text_of_their_route(tmp_path: Path) -> None:
    tables = {"policy": {}, "other": {"kind": "frozen", "engine": "scripted", "tokenizer": str(QWEN3)}}
    async with several(tmp_path, tables) as server:
        ids = (await server.ok("/v1/tokenize", {"model": "other", "prompt": "hello world"}))["tokens"]
        body = {"model": "other", "prompt": ids, "echo": True, "max_tokens": 4}
        assert (await server.ok("/s/v1/completions", body))["choices"][0]["text"].startswith("hello world")


async def test_without_its_table_no_tokenizer_reads_the_turns_of_a_route(tmp_path: Path) -> None:
    async with several(tmp_path) as server:
        await asked(server, "opponent", [user("hello")])
        said = (await server.http.get("/rl/sessions/s?include=reply")).json()["interactions"][0]["reply"]
    async with serving(tmp_path, says()) as server:
        again = (await server.http.get("/rl/sessions/s?include=reply")).json()["interactions"][0]["reply"]
        assert again["choices"] == said["choices"], "the recorded message"
        shown = (await server.http.get("/rl/sessions/s/interactions/0?include=tokens")).json()["tokens"]
        assert set(shown["texts"]) == {None}


async def test_each_route_has_its_own_parser_and_context(tmp_path: Path) -> None:
    tables = {
        "policy": {},
        "plain": {"kind": "frozen", "engine": "scripted", "engine_arg": ["play=agent"], "tool_parser": "pythonic"},
        "short": {"kind": "frozen", "engine": "scripted", "max_context_tokens": 24},
    }
    call = call_text("add", '{"a": 1}')
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    body = {"messages": [user("word " * 40 + 'Say exactly: "[add(a=1)]"')], "tools": tools}
    with mock.patch("proxy.served_engines.load_renderer", load_renderer):
        async with serving(tmp_path, says(call), models=json.dumps(tables)) as server:
            for model, written in (("policy", call), ("plain", "[add(a=1)]")):
                reply = await server.ok("/s/v1/chat/completions", {"model": model, **body})
                (made,) = reply["choices"][0]["message"]["tool_calls"]
                assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("add", {"a": 1})
                turn = (await turns(server))[-1]["id"]
                shown = (await server.http.get(f"/rl/sessions/s/interactions/{turn}?include=ids")).json()
                assert written in server.app.state.turns.routes.decoder(model)(shown["output_ids"])
            refused = await server.post("/s/v1/chat/completions", {"model": "short", **body})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_staleness_is_refused_with_several_trained_models(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 't.db'}"
    more = {"max_staleness": 2, "batch_size": 4, "models": json.dumps(TABLES)}
    with pytest.raises(ConfigurationError, match="--max-staleness counts the versions of one model"):
        check(Settings(engine="scripted", database_url=url, **more))


async def test_a_name_stays_unknown_whatever_is_loaded_later(tmp_path: Path) -> None:
    async with several(tmp_path, {"policy": {}}) as server:
        assert (await asked(server, "policy-1", [user("hello")])).status_code == 404
        await server.ok("/engine/adapters", {"path": "/adapters/1"})
        for model in ("policy-1", "tokengrove-v1", "adapters/1"):
            assert (await asked(server, model, [user("hello")])).status_code == 404
        assert (await asked(server, "policy@1", [user("hello")])).status_code == 200
