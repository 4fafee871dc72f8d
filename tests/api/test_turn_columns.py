"""GET /rl/sessions/{session}/interactions/{turn} with include=columns and include=replay: rows beside tokens."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.store.recordings import SessionReads
from tests.recording import RecordingEngine, experts_at, gap_at, kept_at, recording
from tests.support import Server, assistant, real_server, system, user
from tokengrove.reasons import LogprobsOf

HEAD = [system("Be brief."), user("one")]
LIKELY = math.log(0.5)


async def shown(server: Server, turn: str | int, **query: Any) -> Any:
    """A turn with the parts that are asked for."""
    response = await server.http.get(f"/rl/sessions/s/interactions/{turn}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


async def columns(server: Server, turn: str | int, **query: Any) -> Any:
    return (await shown(server, turn, include="columns", **query))["columns"]


async def forked(server: Server) -> None:
    """Two turns, another child of the first, and a turn that begins anew."""
    first = await server.answer(HEAD)
    await server.answer([*HEAD, first, user("two")])
    await server.answer([*HEAD, first, user("three ⏎ 🙂")])
    await server.answer([*HEAD, assistant("edited"), user("four")])


@pytest.fixture
async def session(tmp_path: Path) -> AsyncIterator[Server]:
    async with recording(tmp_path, "an answer", "more of it", "other 🙂", "fourth") as server:
        await forked(server)
        yield server


def spelled(server: Server) -> Callable[[int], str]:
    """Returns the text of an id; bytes that are no text are written with replacement characters."""
    return lambda token: server.app.state.renderer.decode([token])


async def ids_of(server: Server, turn: str | int) -> tuple[list[int], int]:
    """The ids of a turn's prompt and output, and the length of its prompt."""
    found = await shown(server, turn, include="ids")
    return found["prompt_ids"] + found["output_ids"], len(found["prompt_ids"])


async def test_every_token_but_the_last_has_the_experts_of_the_pass_that_took_it_in(session: Server) -> None:
    for turn in range(4):
        ids, _ = await ids_of(session, turn)
        found = await columns(session, turn, start=0, limit=256)
        assert (found["start"], found["end"]) == (0, len(ids))
        assert found["experts"] == [*map(experts_at, range(len(ids) - 1)), None]


async def test_the_last_token_of_an_answer_has_the_experts_of_the_turn_that_goes_on(session: Server) -> None:
    ids, _ = await ids_of(session, 0)
    last = {"start": len(ids) - 1, "limit": 1}
    assert (await columns(session, 0, **last))["experts"] == [None]
    for child in (1, 2):
        assert (await columns(session, child, **last))["experts"] == [experts_at(len(ids) - 1)]


async def test_a_kept_set_has_its_ids_their_texts_and_its_mass(session: Server) -> None:
    for turn in range(4):
        ids, prompt = await ids_of(session, turn)
        found = await columns(session, turn)
        assert (found["start"], found["end"], len(found["kept"])) == (prompt, len(ids), len(ids) - prompt)
        for position, row in enumerate(found["kept"], prompt):
            wanted = kept_at(position, ids[position], found["vocab_size"])
            if wanted is None:
                assert row is None
                continue
            everything = set(range(found["vocab_size"]))
            listed = everything - set(wanted) if row["excluded"] else set(wanted)
            assert (row["number"], set(row["ids"]), row["more"]) == (len(listed), listed, 0)
            texts = zip(row["texts"], map(spelled(session), row["ids"]), strict=True)
            assert all(text == alone or "\ufffd" in alone for text, alone in texts)
            assert row["excluded"] or row["ids"][0] == ids[position]
            beyond = LIKELY + gap_at(position)
            assert row["mass"] == pytest.approx(math.exp(LIKELY - beyond), rel=1e-5)


async def test_tokens_that_were_not_sampled_have_no_kept_set_and_answers_above_keep_theirs(session: Server) -> None:
    ids, prompt = await ids_of(session, 1)
    _, first_prompt = await ids_of(session, 0)
    own = await columns(session, 0)
    found = await columns(session, 1, start=0, limit=256)
    assert found["kept"][first_prompt : first_prompt + len(own["kept"])] == own["kept"]
    between = slice(first_prompt + len(own["kept"]), prompt)
    assert len(ids) > prompt > between.start
    assert set(map(bool, found["kept"][:first_prompt] + found["kept"][between])) == {False}


async def test_alternatives_are_the_likeliest_first_with_their_texts(session: Server) -> None:
    ids, prompt = await ids_of(session, 0)
    found = await columns(session, 0)
    for position, row in enumerate(found["alternatives"], prompt):
        assert [each[0] for each in row] == [(ids[position] + rank) % found["vocab_size"] for rank in range(5)]
        assert [each[2] for each in row] == pytest.approx([LIKELY * (rank + 1) for rank in range(5)])
        assert row[0][1] == spelled(session)(ids[position])


async def test_a_large_set_lists_its_likeliest_ids_and_counts_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.recording.kept_at", lambda position, token, size: [*range(300), token])
    async with recording(tmp_path, "an answer") as server:
        await server.answer(HEAD)
        found = await columns(server, 0)
        row, sampled = found["kept"][0], found["alternatives"][0][0][0]
        likely = [each[0] for each in found["alternatives"][0] if each[0] == sampled or each[0] < 300]
        assert row["ids"][: len(likely)] == likely
        assert (len(row["ids"]), row["number"]) == (32, 300 + (sampled >= 300))
        assert row["more"] == row["number"] - 32


async def test_rows_that_the_engine_did_not_report_are_null_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.recording.RecordingEngine.lost", staticmethod(lambda position: position % 5 == 2))
    async with recording(tmp_path, "an answer") as server:
        await server.answer(HEAD)
        ids, _ = await ids_of(server, 0)
        rows = [None if at % 5 == 2 else experts_at(at) for at in range(len(ids) - 1)]
        assert (await columns(server, 0, start=0, limit=256))["experts"] == [*rows, None]
        turn = await shown(server, 0, include="replay")
        assert turn["replay"]["routed_experts"] == {"rows": len(rows), "missing": rows.count(None), "stored": True}
        assert turn["notes"]["replay"]["routed_experts"] == rows.count(None) > 0


async def test_what_a_turn_recorded_counts_only_the_tokens_that_it_added(session: Server) -> None:
    above, _ = await ids_of(session, 0)
    ids, prompt = await ids_of(session, 1)
    replay = (await shown(session, 1, include="replay"))["replay"]
    assert replay["routed_experts"] == {"rows": len(ids) - len(above), "missing": 0, "stored": True}
    unknown = sum(position % 11 == 0 for position in range(prompt, len(ids)))
    assert replay["kept"] == {"rows": len(ids) - prompt, "missing": unknown, "stored": True}
    assert replay["top_logprobs"] == {"rows": len(ids) - prompt, "missing": 0, "stored": True}


async def test_columns_that_no_turn_recorded_are_null(tmp_path: Path) -> None:
    async with recording(tmp_path, "an answer", replay=["kept"]) as server:
        await server.answer(HEAD)
        found = await columns(server, 0)
        assert found["kept"] and found["experts"] is found["alternatives"] is None
    (tmp_path / "plain").mkdir()
    async with recording(tmp_path / "plain", "an answer", replay=[]) as server:
        await server.answer(HEAD)
        turn = await shown(server, 0, include="replay,columns")
        assert turn["replay"] == {} and "replay" not in turn["notes"]
        assert [turn["columns"][name] for name in ("kept", "experts", "alternatives")] == [None] * 3


async def test_only_the_columns_of_turns_whose_tokens_are_shown_are_read(
    session: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[str]] = []
    load = SessionReads.load_turn_columns

    async def noted(self: Any, session_id: str, interaction_ids: list[str]) -> Any:
        read.append(list(interaction_ids))
        return await load(self, session_id, interaction_ids)

    monkeypatch.setattr(SessionReads, "load_turn_columns", noted)
    nodes = await session.tree()
    _, prompt = await ids_of(session, 1)
    await columns(session, 1)
    await columns(session, 1, start=0, limit=3)
    await columns(session, 1, start=prompt - 30, limit=60)
    assert read[:2] == [[nodes[1]["id"]], [nodes[0]["id"]]]
    assert read[2] == [nodes[0]["id"], nodes[1]["id"]]


async def test_a_turn_without_logprobs_by_the_rule_has_kept_sets_without_mass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RecordingEngine._chunk
    sampled = lambda *given: replace(made(*given), logprobs_of=LogprobsOf.SAMPLED)  # noqa: E731
    monkeypatch.setattr(RecordingEngine, "_chunk", sampled)
    async with recording(tmp_path, "an answer") as server:
        await server.answer(HEAD)
        found = (await columns(server, 0))["kept"]
        assert any(found) and {row["mass"] for row in found if row} == {None}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"include": "columns", "limit": "257"}, "limit"),
        ({"include": "columns", "limit": "0"}, "limit"),
        ({"include": "columns", "limit": "many"}, "limit"),
        ({"include": "columns", "start": "-1"}, "start"),
        ({"include": "columns", "start": "10000"}, "start"),
        ({"include": "columns", "layout": "tree"}, "layout"),
        ({"include": "tokens", "start": "3"}, "start"),
        ({"limit": "3"}, "limit"),
        ({"include": "replay", "drift": "mask"}, "drift"),
    ],
)
async def test_a_wrong_page_is_named(session: Server, query: dict[str, str], param: str) -> None:
    response = await session.http.get("/rl/sessions/s/interactions/0", params=query)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_page_is_a_slice_of_the_whole(session: Server) -> None:
    ids, _ = await ids_of(session, 2)
    whole = await columns(session, 2, start=0, limit=256)
    for start in range(0, len(ids), 7):
        page = await columns(session, 2, start=start, limit=7)
        assert page["end"] == min(start + 7, len(ids))
        for name in ("kept", "experts", "alternatives"):
            assert page[name] == whole[name][start : start + 7]
    assert (await columns(session, 2, start=len(ids)))["kept"] == []


@pytest.mark.engines
def test_the_mass_of_a_set_is_the_probability_of_its_ids_under_the_model(tmp_path: Path) -> None:
    with real_server(tmp_path, engine="transformers", replay=("kept", "top_logprobs"), alternatives=8) as url:
        given: dict[str, dict[str, Any]] = {
            "k": {"top_k": 3},
            "p": {"top_p": 0.004},
            "t": {"top_k": 5, "temperature": 0.5},
        }
        for name, fields in given.items():
            body = {"model": "m", "max_tokens": 12, "messages": HEAD, **fields}
            assert httpx.post(f"{url}/{name}/v1/chat/completions", json=body, timeout=60).status_code == 200
            turn = httpx.get(f"{url}/rl/sessions/{name}/interactions/0?include=columns").json()
            rows = list(zip(turn["columns"]["kept"], turn["columns"]["alternatives"], strict=True))
            assert len(rows) == turn["output_tokens"] > 0 and turn["notes"]["replay"]["kept"] == 0
            for row, alternatives in rows:
                known = {token: math.exp(logprob) for token, _, logprob in alternatives}
                assert row["ids"] == [token for token in known if token in row["ids"]]
                assert row["mass"] == pytest.approx(sum(known[token] for token in row["ids"]), rel=1e-4)
