"""Replay columns: asked for by a session or for all sessions, stored beside the turns, and never in a reply."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from proxy.engine.chunks import TokenChunk
from proxy.engine.interface import EngineInfo
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Fault, Reply, play
from proxy.side_columns.columns import DECLARED, EXPERTS, KEPT, KEPT_LOGPROBS, TOP_IDS, TOP_LOGPROBS
from proxy.side_columns.rows import SideColumn, spread
from proxy.store.database import parse_url, writer_engine
from proxy.types import Interaction
from tests.recording_engine import RecordingEngine, experts_of, kept_of
from tests.support import (
    Server,
    assistant,
    call_text,
    default_url,
    function_tool,
    sampled,
    says,
    serving,
    tool_result,
    user,
)
from tokengrove.client.readers.read import read
from tokengrove.errors import ConfigurationError

EVERYTHING = ["experts", "kept", "top_logprobs"]
Columns = dict[str, dict[str, SideColumn]]


async def stored(server: Server, session: str = "s") -> tuple[list[Interaction], Columns]:
    """The turns of a session, and their columns by id and name."""
    recordings = server.app.state.store.recordings
    return await recordings.load_interactions(session), await recordings.load_columns(session, DECLARED)


def check(node: Interaction, found: dict[str, SideColumn], prompt: list[int]) -> None:
    """Raise AssertionError unless a turn with this whole prompt has the rows that the engine reports."""
    output = list(node.output_ids)
    assert node.replay == dict.fromkeys(DECLARED, 0)
    sets = [ids.tolist() for ids in found[KEPT].rows.sets()]
    assert sets == [kept_of(token) for token in output]
    assert {found[name].start for name in DECLARED if DECLARED[name].of_output} == {len(prompt)}
    assert {len(found[name].rows) for name in DECLARED if DECLARED[name].of_output} == {len(output)}
    assert found[TOP_IDS].rows.values[:, 0].tolist() == output
    start = max(node.prefix_length - 1, 0)
    assert found[EXPERTS].start == start
    rows = experts_of([*prompt, *output][start:-1], start)
    assert np.array_equal(found[EXPERTS].rows.values, rows)


async def test_a_session_records_what_it_asks_for(tmp_path: Path, database_url: str) -> None:
    settings: dict[str, Any] = {"database_url": database_url, "engine_type": RecordingEngine}
    async with serving(tmp_path, says("one", "two", "three"), **settings) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "replay": EVERYTHING, "alternatives": 3})
        await server.chat([user("hello")])
        await server.chat([user("hello")], session="other")
        nodes, found = await stored(server)
        check(nodes[0], found[nodes[0].id], server.prompts()[0])
        assert found[nodes[0].id][TOP_LOGPROBS].rows.inner == (3,)
        others, none = await stored(server, "other")
        assert (others[0].replay, none) == ({}, {})
        assert server.engine.requests[1].columns is None


async def test_a_later_turn_adds_the_rows_from_the_last_token_of_its_prefix_on(tmp_path: Path) -> None:
    script, settings = says("one", "two", "three"), {"replay": tuple(EVERYTHING)}
    async with serving(tmp_path, script, engine_type=RecordingEngine, **settings) as server:
        talk = [user("hello")]
        for words in ("and", "then"):
            talk += [assistant((await server.answer(talk))["content"]), user(words)]
        await server.chat(talk)
        nodes, found = await stored(server)
        for node, prompt in zip(nodes, server.prompts(), strict=True):
            check(node, found[node.id], prompt)
        assert [bool(node.prefix_length) for node in nodes] == [False, True, True]
        whole = [*server.prompts()[-1], *nodes[-1].output_ids]
        experts = spread([found[node.id][EXPERTS] for node in nodes], 0, len(whole))
        assert np.array_equal(experts.values[:-1], experts_of(whole[:-1], 0))
        assert experts.missing.tolist() == [False] * (len(whole) - 1) + [True]


async def test_the_choices_of_a_reply_have_rows_of_their_own(tmp_path: Path) -> None:
    script, settings = says("one", "or two"), {"replay": tuple(EVERYTHING)}
    async with serving(tmp_path, script, engine_type=RecordingEngine, **settings) as server:
        await server.chat([user("hello")], n=2)
        nodes, found = await stored(server)
        assert len({len(node.output_ids) for node in nodes}) == 2
        for node in nodes:
            check(node, found[node.id], server.prompts()[0])


async def test_the_rows_of_a_stop_string_are_cut_with_its_tokens(tmp_path: Path) -> None:
    script = play([Reply(sampled("one two STOP three four"), chunk=64)])
    async with serving(tmp_path, script, engine_type=RecordingEngine, replay=tuple(EVERYTHING)) as server:
        await server.chat([user("hello")], stop=["STOP"])
        (node,), found = await stored(server)
        assert node.finish_reason == "stop_string"
        assert len(node.output_ids) < len(sampled("one two STOP three four"))
        check(node, found[node.id], server.prompts()[0])


async def test_a_session_overrides_the_option_of_the_server(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"replay": ("kept",), "max_kept": 2, "engine_type": RecordingEngine}
    async with serving(tmp_path, says("one", "two", "three"), **settings) as server:
        await server.ok("/rl/start_session", {"session_id": "none", "replay": []})
        await server.ok("/rl/start_session", {"session_id": "wide", "max_kept": 99})
        recorded = {}
        for name in ("none", "wide", "s"):
            await server.chat([user("hello")], session=name)
            (node,), found = await stored(server, name)
            recorded[name] = (node.replay, set(found.get(node.id, {})))
        assert recorded["none"] == ({}, set())
        assert recorded["wide"] == ({KEPT: 0, KEPT_LOGPROBS: 0}, {KEPT, KEPT_LOGPROBS})
        too_large = sum(len(kept_of(token)) > 2 for token in sampled("three"))
        assert recorded["s"] == ({KEPT: too_large, KEPT_LOGPROBS: 0}, {KEPT, KEPT_LOGPROBS})
        assert too_large


async def test_a_session_that_asks_for_what_the_engine_does_not_record_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        for replay in (["experts"], ["top_logprobs", "kept"]):
            refused = await server.post("/rl/start_session", {"session_id": "s", "replay": replay})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "replay")
            assert replay[-1] in error["message"] and "scripted" in error["message"]
        await server.ok("/rl/start_session", {"session_id": "s", "replay": ["top_logprobs"]})
        unknown = await server.post("/rl/start_session", {"session_id": "t", "replay": ["moods"]})
        assert unknown.status_code == 400 and "replay" in unknown.json()["error"]["message"]


async def test_a_server_whose_engine_does_not_record_what_is_asked_for_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--replay kept: the engine 'scripted' does not report"):
        async with serving(tmp_path, says(), replay=("top_logprobs", "kept")):
            pass


class DenseEngine(ScriptedEngine):
    """Its model is known to have no experts."""

    def info(self) -> EngineInfo:
        info = super().info()
        return EngineInfo(**{name: getattr(info, name) for name in EngineInfo.__dataclass_fields__} | {"dense": True})


async def test_a_dense_model_records_no_experts_and_is_not_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"replay": ("experts", "top_logprobs"), "engine_type": DenseEngine}
    async with serving(tmp_path, says("one", "two"), **settings) as server:
        await server.ok("/rl/start_session", {"session_id": "experts", "replay": ["experts"]})
        for name in ("experts", "s"):
            await server.chat([user("hello")], session=name)
        (node,), found = await stored(server, "experts")
        assert (node.replay, found, server.engine.requests[0].columns) == ({}, {}, None)
        (node,), _ = await stored(server, "s")
        assert set(node.replay) == {TOP_IDS, TOP_LOGPROBS}


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": [user("hello")]}),
    ("chat/completions", {"messages": [user("hello")], "logprobs": True, "top_logprobs": 2}),
    ("responses", {"input": "hello"}),
    ("messages", {"messages": [user("hello")], "max_tokens": 50}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", CALLS, ids=["chat", "logprobs", "responses", "messages"])
async def test_a_reply_is_the_same_with_and_without_recording(
    tmp_path: Path, call: tuple[str, dict[str, Any]], stream: bool
) -> None:
    path, body = call
    async with serving(tmp_path, says("some words", "some words"), engine_type=RecordingEngine) as server:
        replies = []
        for session, replay in (("s", EVERYTHING), ("t", [])):
            options = {"replay": replay, "alternatives": 5} if replay else {"replay": replay}
            await server.ok("/rl/start_session", {"session_id": session, **options})
            reply = await server.post(f"/{session}/v1/{path}", {"model": "m", "stream": stream, **body})
            assert reply.status_code == 200
            replies.append(constant(reply.text))
        assert replies[0] == replies[1]
        (node,), found = await stored(server)
        assert set(found[node.id]) == set(DECLARED)
        assert found[node.id][TOP_IDS].rows.inner == (5,)


def constant(text: str) -> str:
    """A reply without its ids and times."""
    return re.sub(r'(chatcmpl-|resp_|msg_)\w+|"(created|created_at|completed_at)":[\d.]+', "", text)


async def test_a_turn_that_failed_has_no_columns(tmp_path: Path) -> None:
    script = play([Reply(sampled("one two three"), fault=Fault.ERROR, fault_after=3)])
    async with serving(tmp_path, script, engine_type=RecordingEngine, replay=tuple(EVERYTHING)) as server:
        failed = await server.post("/s/v1/chat/completions", {"model": "m", "messages": [user("hello")]})
        assert failed.is_error
        (node,), found = await stored(server)
        assert (node.status, node.replay, found) == ("failed", {}, {})
        assert node.output_ids


async def test_rows_that_an_engine_does_not_report_are_missing(tmp_path: Path) -> None:
    class Forgetful(RecordingEngine):
        def _kept(self, chunk: TokenChunk, *given: Any) -> dict[str, SideColumn]:
            return {} if chunk.ids[0] % 2 else super()._kept(chunk, *given)

    script, settings = says("some more words"), {"replay": ("kept",)}
    async with serving(tmp_path, script, engine_type=Forgetful, **settings) as server:
        await server.chat([user("hello")])
        (node,), found = await stored(server)
        gone = [token % 2 == 1 for token in node.output_ids]
        assert found[node.id][KEPT].rows.missing.tolist() == gone and any(gone)
        assert np.isnan(found[node.id][KEPT_LOGPROBS].rows.values).tolist() == gone
        assert node.replay == {KEPT: sum(gone), KEPT_LOGPROBS: sum(gone)}


async def test_the_columns_of_a_deleted_session_are_deleted(tmp_path: Path, database_url: str) -> None:
    settings: dict[str, Any] = {"database_url": database_url, "replay": ("kept",), "engine_type": RecordingEngine}
    async with serving(tmp_path, says("one", "two"), **settings) as server:
        for name in ("s", "t"):
            await server.chat([user("hello")], session=name)
        assert (await server.http.delete("/rl/sessions/s")).status_code == 200
        recordings = server.app.state.store.recordings
        assert await recordings.load_columns("s", DECLARED) == {}
        assert len(await recordings.load_columns("t", DECLARED)) == 1


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"replay": ["top_logprobs"], "max_kept": 9}, "max_kept"),
        ({"replay": ["kept"], "alternatives": 2}, "alternatives"),
        ({"alternatives": 2}, "alternatives"),
    ],
)
async def test_an_option_of_a_column_that_is_not_recorded_is_refused(
    tmp_path: Path, options: dict[str, Any], param: str
) -> None:
    async with serving(tmp_path, says("some words"), engine_type=RecordingEngine) as server:
        response = await server.post("/rl/start_session", {"session_id": "s", **options})
    assert response.status_code == 400 and response.json()["error"]["param"] == param


async def test_an_answer_that_the_client_sends_back_changed_keeps_its_rows(tmp_path: Path) -> None:
    """The client leaves out the text beside a call, and the sampled tokens are continued."""
    script, settings = says("I look.\n" + call_text("look", '{"at": 1}'), "done"), {"replay": tuple(EVERYTHING)}
    more = {"tools": [function_tool("look", {"at": {"type": "integer"}})]}
    async with serving(tmp_path, script, engine_type=RecordingEngine, **settings) as server:
        echoed = await server.answer([user("where?")], **more)
        assert echoed["content"]
        answers = [{**echoed, "content": None}, tool_result(echoed["tool_calls"][0]["id"], "there")]
        await server.chat([user("where?"), *answers], **more)
        nodes, found = await stored(server)
        assert nodes[1].echo and nodes[1].prefix_length
        for node, prompt in zip(nodes, server.prompts(), strict=True):
            check(node, found[node.id], prompt)


@pytest.mark.parametrize("name", ["npz", "json"])
async def test_sessions_with_different_numbers_of_alternatives_are_exported_together(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path, says("some words", "some words"), engine_type=RecordingEngine) as server:
        for session, number in (("s", 2), ("t", 4)):
            body = {"session_id": session, "replay": ["top_logprobs"], "alternatives": number}
            await server.ok("/rl/start_session", body)
            await server.ok(f"/{session}/v1/chat/completions", {"model": "m", **CALLS[0][1]})
        body = {"session_ids": ["s", "t"], "format": name, "replay": ["top_logprobs"]}
        response = await server.post("/trajectories/export", body)
    samples = {sample.session_id: sample for sample in read(response.content, name).samples}
    for session, number in (("s", 2), ("t", 4)):
        trained = samples[session].loss_mask == 1
        top = samples[session].extra["top_logprobs"][trained]
        assert top.shape[1] == 4 and (~np.isnan(top)).sum(axis=1).max() <= number
        ids = samples[session].extra["top_token_ids"][trained]
        assert ((ids == np.iinfo(ids.dtype).max) == np.isnan(top)).all()


async def test_an_export_warns_of_columns_whose_rows_are_not_stored(tmp_path: Path) -> None:
    async with serving(tmp_path, says("some words"), engine_type=RecordingEngine) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "replay": ["kept"]})
        await server.ok("/s/v1/chat/completions", {"model": "m", **CALLS[0][1]})
        await server.ok("/s/rl/end_session", {})
        engine = writer_engine(parse_url(default_url(tmp_path)))
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM side_columns"))
        engine.dispose()
        response = await server.post("/trajectories/export", {"session_id": "s", "format": "npz"})
    assert read(response.content, "npz").sessions["s"]["warnings"] == [
        "1 of 1 turns recorded kept, and none of their rows is stored",
        "1 of 1 turns recorded kept_logprobs, and none of their rows is stored",
    ]
