"""Every case of a repeated request: attach, sample again, supersede or replay; and `n` choices, which are siblings."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import proxy.turns.earlier
import proxy.turns.turns
from proxy.engine.scripted.scripts import Fault, Reply, Script, play
from proxy.store.sql import reads
from proxy.store.turn_log import TurnLog
from proxy.types import Interaction
from tests.exports import entries
from tests.support import Server, call_text, function_tool, sampled, says, serving, tiny_renderer, until, user
from tests.wide import CROSSED
from tokengrove.errors import StoreUnavailable
from tokengrove.reasons import Status

BODY = {"model": "m", "messages": [user("hi")]}
MARKS: list[dict[str, str]] = [{"x-stainless-retry-count": "1"}, {"idempotency-key": "k"}]
CHAT = "/s/v1/chat/completions"


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy.turns.turns, "GRACE_S", 0.5)


async def ask(server: Server, **headers: str) -> Any:
    response = await server.post(CHAT, BODY, headers=headers)
    return response.json()


async def in_flight(server: Server, **headers: str) -> asyncio.Task[Any]:
    before = len(server.engine.requests)
    task = asyncio.create_task(ask(server, **headers))
    await until(lambda: len(server.engine.requests) > before)
    return task


def slow(*texts: str) -> Script:
    return play([Reply(sampled(text), delay_s=0.03) for text in texts])


@pytest.mark.parametrize("mark", MARKS)
async def test_in_flight_with_its_client_a_marked_retry_attaches(tmp_path: Path, mark: dict[str, str]) -> None:
    async with serving(tmp_path, slow("one two three")) as server:
        first = await in_flight(server, **({} if "x-stainless-retry-count" in mark else mark))
        second = await ask(server, **mark)
        assert second == await first
        assert len(server.engine.requests) == 1
        assert len(await server.tree()) == 1


async def test_in_flight_with_its_client_an_unmarked_request_is_another_sample(tmp_path: Path) -> None:
    async with serving(tmp_path, slow("one two", "three four")) as server:
        first = await in_flight(server)
        second = await ask(server)
        assert second["id"] != (await first)["id"]
        assert [node["reason"] for node in await server.tree()] == ["first", "resampled"]


@pytest.mark.parametrize("mark", [{}, *MARKS])
async def test_in_flight_without_its_client_a_retry_attaches(tmp_path: Path, mark: dict[str, str]) -> None:
    async with serving(tmp_path, slow("one two three four five six seven")) as server:
        first = await in_flight(server)
        first.cancel()  # over ASGI, cancelling is a disconnect
        await asyncio.gather(first, return_exceptions=True)
        reply = await ask(server, **mark)
        assert reply["choices"][0]["message"]["content"] == "one two three four five six seven"
        assert len(server.engine.requests) == 1
        assert [node["status"] for node in await server.tree()] == ["complete"]


@pytest.mark.parametrize("mark", [{}, *MARKS])
async def test_a_failed_attempt_is_superseded(tmp_path: Path, mark: dict[str, str]) -> None:
    script = play([Reply(sampled("one"), fault=Fault.ERROR, fault_after=1), Reply(sampled("two"))])
    async with serving(tmp_path, script) as server:
        assert (await ask(server))["error"]["code"] == "engine_failed"
        assert (await ask(server, **mark))["choices"][0]["message"]["content"] == "two"
        tree = await until_status(server, "superseded")
        assert sorted(node["status"] for node in tree) == ["complete", "superseded"]
        exported = await server.ok("/export_trajectories", {"session_id": "s"})
        entry = entries(exported)["s"]
        assert (entry["complete"], entry["failed"], entry["superseded"]) == (True, 0, 1)


async def test_an_aborted_attempt_is_superseded(tmp_path: Path) -> None:
    script = play([Reply(sampled("one two"), fault=Fault.HANG, fault_after=1), Reply(sampled("two"))])
    async with serving(tmp_path, script) as server:
        first = await in_flight(server)
        first.cancel()
        await until_status(server, "aborted")
        assert (await ask(server))["choices"][0]["message"]["content"] == "two"
        await until_superseded(server)
        assert sorted(node["status"] for node in await server.tree()) == ["complete", "superseded"]


@CROSSED
@pytest.mark.parametrize("mark", [{}, *MARKS])
@pytest.mark.parametrize("restarted", [False, True])
async def test_a_committed_reply_that_was_never_written_is_replayed(
    tmp_path: Path, mark: dict[str, str], restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy.turns.turns, "GRACE_S", 60.0)  # a loaded machine may need longer than the default
    async with serving(tmp_path, slow("one")) as server:
        first = await in_flight(server)
        first.cancel()
        tree = await until_status(server, "complete")  # it is committed within the grace period, without a reader
        if not restarted:
            await assert_replays(server, mark, tree[0]["id"])
    if restarted:
        async with serving(tmp_path, says()) as server:
            await assert_replays(server, mark, tree[0]["id"])


async def assert_replays(server: Server, mark: dict[str, str], reply_id: str) -> None:
    before = len(server.engine.requests)
    reply = await ask(server, **mark)
    assert (reply["id"], reply["choices"][0]["message"]["content"]) == (reply_id, "one")
    assert len(server.engine.requests) == before
    assert len(await server.tree()) == 1


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_written_reply_is_replayed_to_a_marked_retry_only(tmp_path: Path, restarted: bool) -> None:
    mark = {"x-stainless-retry-count": "2"}
    async with serving(tmp_path, says("one", "two")) as server:
        first = await ask(server)
        if not restarted:
            assert await ask(server, **mark) == first
            assert (await ask(server))["choices"][0]["message"]["content"] == "two"
    if restarted:
        async with serving(tmp_path, says("two")) as server:
            assert (await ask(server, **mark))["id"] == first["id"]
            assert (await ask(server))["choices"][0]["message"]["content"] == "two"


async def test_replays_take_turns_in_the_passes_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty clients that asked for a long reply again held the others for three seconds."""
    passes, parts, yield_to_others = 0, Counter[int](), proxy.turns.earlier.EarlierAttempts.yield_to_others

    async def counted(earlier: proxy.turns.earlier.EarlierAttempts) -> None:
        await yield_to_others(earlier)
        parts[passes] += 1

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(proxy.turns.earlier.EarlierAttempts, "yield_to_others", counted)
    body = {**BODY, "logprobs": True}
    async with serving(tmp_path, play([Reply(sampled("one two three " * 700))])) as server:
        first = (await server.post(CHAT, body)).json()
        counting = asyncio.create_task(count())
        headers = {"x-stainless-retry-count": "1"}
        asked = [server.post(CHAT, {**body, "stream": stream}, headers=headers) for stream in (True, False) * 4]
        replies = await asyncio.gather(*asked)
        counting.cancel()
        assert all(reply.json() == first for reply in replies[1::2])
        assert all(reply.content.endswith(b"[DONE]\n\n") for reply in replies[::2])
        assert sum(parts.values()) > 20 and max(parts.values()) == 1


async def test_a_replay_can_stream_a_unary_reply_with_calls_and_reasoning(tmp_path: Path) -> None:
    tools = [function_tool("add", {"a": {"type": "integer"}})]
    text = "<think>\nwhy\n</think>\n\n" + call_text("add", '{"a": 1}')
    async with serving(tmp_path, says(text)) as server:
        first = await server.chat([user("q")], tools=tools)
        body = {"model": "m", "messages": [user("q")], "tools": tools, "stream": True}
        response = await server.post(CHAT, body, headers={"x-stainless-retry-count": "1"})
        assert response.text.endswith("data: [DONE]\n\n")
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in response.text.split("\n\n")[:-2]]
        message = first["choices"][0]["message"]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
        assert calls[0]["id"] == message["tool_calls"][0]["id"]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        assert arguments == message["tool_calls"][0]["function"]["arguments"]
        assert first["id"] in response.text
        assert len(server.engine.requests) == 1


async def test_a_retry_count_of_zero_marks_no_retry(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        headers = {"x-stainless-retry-count": "0"}
        assert (await ask(server, **headers))["id"] != (await ask(server, **headers))["id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_siblings_of_one_reply(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, says("one", "two", "three")) as server:
        response = await server.post(CHAT, {**BODY, "n": 3, "stream": stream})
        tree = await server.tree()
        ids = sorted(node["id"] for node in tree)
        assert ids == [ids[0], f"{ids[0]}.1", f"{ids[0]}.2"]
        assert sorted(node["reason"] for node in tree) == ["first", "resampled", "resampled"]
        assert len(await server.export()) == 3
        if not stream:
            choices = response.json()["choices"]
            assert [choice["index"] for choice in choices] == [0, 1, 2]
            assert [choice["message"]["content"] for choice in choices] == ["one", "two", "three"]
            retried = await server.post(CHAT, {**BODY, "n": 3}, headers={"x-stainless-retry-count": "1"})
            assert retried.json() == response.json()
        else:
            assert response.text.count('"finish_reason":"stop"') == 3


async def test_visible_tokens_have_logprobs_and_alternatives(tmp_path: Path) -> None:
    async with serving(tmp_path, says("<think>\nhm\n</think>\n\nhello there", "hello there")) as server:
        reply = await server.chat([user("q")], logprobs=True, top_logprobs=2)
        content = reply["choices"][0]["logprobs"]["content"]
        assert "".join(token["token"] for token in content).strip() == "hello there"
        assert all(len(token["top_logprobs"]) == 2 and token["logprob"] < 0 for token in content)
        assert all(bytes(token["bytes"]).decode() == token["token"] for token in content)
        streamed = await server.post(CHAT, {**BODY, "logprobs": True, "stream": True})
        assert streamed.text.count('"top_logprobs":[]') == len(sampled("hello there", end=False))


async def test_without_parallel_calls_sampling_ends_after_the_first_call(tmp_path: Path) -> None:
    tools = [function_tool("add", {"a": {"type": "integer"}})]
    calls = call_text("add", '{"a": 1}') + "\n" + call_text("add", '{"a": 2}')
    async with serving(tmp_path, play([Reply(sampled(calls), chunk=500), Reply(sampled("ok"))])) as server:
        reply = await server.chat([user("q")], tools=tools, parallel_tool_calls=False)
        assert len(reply["choices"][0]["message"]["tool_calls"]) == 1
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        (sample,) = await server.export()
        kept = sampled(call_text("add", '{"a": 1}'), end=False)
        assert sample["input_ids"][-len(kept) :] == list(kept)
        assert tiny_renderer().stop_token_ids[0] not in sample["input_ids"][-len(kept) :]


# Several earlier attempts -------------------------------------------------------------------------------------------


async def text_of(server: Server, **headers: str) -> Any:
    reply = await ask(server, **headers)
    return reply["choices"][0]["message"]["content"] if "choices" in reply else reply["error"]["code"]


async def test_a_retry_of_a_failure_after_a_success_is_sampled_and_not_replayed(tmp_path: Path) -> None:
    failing = Reply(sampled("x"), fault=Fault.ERROR)
    async with serving(tmp_path, play([Reply(sampled("one")), failing, Reply(sampled("two"))])) as server:
        assert [await text_of(server), await text_of(server)] == ["one", "engine_failed"]
        assert await text_of(server, **{"x-stainless-retry-count": "1"}) == "two"
        await until_superseded(server)


async def until_superseded(server: Server) -> None:
    await until_status(server, "superseded")


async def until_status(server: Server, status: str) -> Any:
    """Wait until a node has the status; return the tree."""
    for _ in range(3000):
        response = await server.http.get("/rl/sessions/s")
        nodes = response.json().get("interactions", [])
        if any(node["status"] == status for node in nodes):
            return nodes
        await asyncio.sleep(0.02)
    raise AssertionError(nodes)


async def test_an_idempotency_key_selects_the_attempt_with_that_key(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three")) as server:
        said = [await text_of(server, **{"idempotency-key": key}) for key in ("a", "b", "a", "b", "c")]
        assert said == ["one", "two", "one", "two", "three"]


async def test_if_one_choice_failed_all_are_sampled_again(tmp_path: Path) -> None:
    failing = Reply(sampled("x"), fault=Fault.ERROR)
    replies = [Reply(sampled("one")), failing, Reply(sampled("two")), Reply(sampled("three"))]
    async with serving(tmp_path, play(replies)) as server:
        assert (await server.post(CHAT, {**BODY, "n": 2})).status_code == 502
        response = await server.post(CHAT, {**BODY, "n": 2}, headers={"x-stainless-retry-count": "1"})
        assert [choice["message"]["content"] for choice in response.json()["choices"]] == ["two", "three"]
        await until_superseded(server)
        assert sorted(node["status"] for node in await server.tree()) == ["complete"] * 3 + ["superseded"]


async def test_a_stream_of_choices_that_fail_before_any_output_has_the_status_of_the_error(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda request: Reply(sampled("x"), fault=Fault.ERROR)) as server:
        response = await server.post(CHAT, {**BODY, "n": 2, "stream": True})
        assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_failed")


async def test_a_reply_of_several_choices_that_was_written_is_not_replayed_after_a_restart(tmp_path: Path) -> None:
    body = {**BODY, "n": 2}
    async with serving(tmp_path, says("one", "two")) as server:
        first = await server.ok(CHAT, body)
    async with serving(tmp_path, says("three", "four")) as server:
        assert (await server.ok(CHAT, body))["id"] != first["id"]


async def test_each_of_many_identical_unmarked_requests_is_a_sample(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda request: Reply(sampled("x"), chunk=9)) as server:
        replies = await asyncio.gather(*(ask(server) for _ in range(100)))
        assert len({reply["id"] for reply in replies}) == 100
        assert len(await server.export()) == 100


async def test_a_refused_retry_leaves_the_failed_attempt_unchanged(tmp_path: Path) -> None:
    async with serving(tmp_path, play([Reply(sampled("x"), fault=Fault.ERROR)])) as server:
        await ask(server)
        refused = await server.post(CHAT, {**BODY, "messages": [user("hi")] * 2 + [user("x" * 300_000)]})
        assert refused.status_code == 400
        assert [node["status"] for node in await server.tree()] == ["failed"]


async def test_a_retry_during_the_abort_of_its_predecessor_is_sampled(tmp_path: Path) -> None:
    script = play([Reply(sampled("one two"), fault=Fault.HANG, fault_after=1), Reply(sampled("two"))])
    async with serving(tmp_path, script) as server:
        first = await in_flight(server)
        first.cancel()
        await until(lambda: bool(server.app.state.turns.running._turns) and not attempts(server)[0].grace)
        await until(lambda: not attempts(server) or attempts(server)[0].stage != "running")
        assert await text_of(server) == "two"
        await until_superseded(server)


def attempts(server: Server) -> Any:
    return [turn.attempt for turn in server.app.state.turns.running._turns]


_LONG = "one two three four five six seven é 🙂 " * 30


@CROSSED
@pytest.mark.parametrize("stop", [[], ["zzz"], ["seven END"]])
@pytest.mark.parametrize(
    "text",
    [
        "hello there",
        "<think>\nhm\n</think>\n\nhello there",
        f"<think>\n{_LONG}\n</think>\n\n{_LONG}",
        f"{_LONG} seven END",
    ],
)
async def test_replayed_logprobs_are_those_of_the_reply(tmp_path: Path, text: str, stop: list[str]) -> None:
    async with serving(tmp_path, says(text)) as server:
        body, retry = {**BODY, "logprobs": True, "stop": stop}, {"x-stainless-retry-count": "1"}
        first = (await server.post(CHAT, body)).json()
        assert (await server.post(CHAT, body, headers=retry)).json() == first
        (choice,) = first["choices"]
        assert choice["logprobs"]["content"]
        streamed = await server.post(CHAT, {**body, "stream": True}, headers=retry)
        chunks = [json.loads(line[6:]) for line in streamed.text.split("\n") if line.startswith("data: {")]
        parts = [chunk["choices"][0] for chunk in chunks]
        assert "".join(part["delta"].get("content") or "" for part in parts) == choice["message"]["content"]
        shown = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        reported = choice["logprobs"]["content"]  # those of the end have no text to come with
        assert shown == reported[: len(shown)] and len(shown) >= len(reported) - 12


async def test_a_turn_limit_counts_each_turn_once_and_every_choice(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda request: Reply(sampled("x"), delay_s=0.01)) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "limits": {"max_turns": 4}})
        assert (await server.post(CHAT, {**BODY, "n": 5})).json()["error"]["code"] == "session_limit_reached"
        answers = await asyncio.gather(*(server.post(CHAT, BODY) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        assert (await server.post(CHAT, BODY)).status_code == 403


async def test_all_choices_together_stay_within_the_token_limit_of_the_session(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda request: Reply(sampled("one two three four five six"))) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "limits": {"max_total_tokens": 11}})
        reply = (await server.post(CHAT, {**BODY, "n": 3})).json()
        assert [choice["finish_reason"] for choice in reply["choices"]] == ["length"] * 3
        assert [node["output_tokens"] for node in await server.tree()] == [3, 3, 3]
        refused = (await server.post(CHAT, {**BODY, "n": 3})).json()["error"]
        assert (refused["code"], refused["param"]) == ("session_limit_reached", "limits.max_total_tokens")


async def test_each_choice_has_a_seed_of_its_own_so_that_they_differ(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three")) as server:
        await server.ok(CHAT, {**BODY, "n": 3, "seed": 7})
        assert [request.sampling.seed for request in server.engine.requests] == [7, 8, 9]


async def test_concurrent_named_rewards_are_all_kept(tmp_path: Path) -> None:
    async with serving(tmp_path, says("x")) as server:
        await ask(server)
        bodies = [{"reward": float(number), "name": f"r{number}"} for number in range(5)]
        await asyncio.gather(*(server.ok("/s/rl/set_reward", body) for body in bodies))
        assert (await server.tree())[0]["rewards"] == {f"r{number}": number for number in range(5)}
        stored = await server.app.state.store.recordings.load_interactions("s")
        assert len(stored[0].rewards) == 5


async def test_the_certificate_counts_a_running_turn(tmp_path: Path) -> None:
    async with serving(tmp_path, slow("one two three")) as server:
        turn = await in_flight(server)
        await server.ok("/engine/pause_generation", {"mode": "in_place"})
        while await server.app.state.store.keys.load_session("s") is None:
            pass  # its row is being written
        entry = entries(await server.ok("/export_trajectories", {"session_id": "s"}))["s"]
        assert (entry["complete"], entry["begun_not_ended"]) == (False, 1)
        await server.ok("/engine/continue_generation", {})
        await turn
        entry = entries(await server.ok("/export_trajectories", {"session_id": "s"}))["s"]
        assert entry["complete"]


async def test_a_turn_that_completes_while_its_session_ends_has_its_return(tmp_path: Path) -> None:
    async with serving(tmp_path, slow("one", "two")) as server:
        await ask(server)
        turn = await in_flight(server)
        await server.ok("/s/rl/end_session", {"reward": 1.0})
        await turn
        wanted = {node["id"] for node in await server.tree() if node["status"] == "complete"}
        assert len(wanted) == 2
        assert {key[0] for key in await server.app.state.store.database.read(reads.load_returns, "s")} == wanted


async def test_a_retry_that_comes_while_a_failure_is_recorded_is_sampled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, go = asyncio.Event(), asyncio.Event()
    append = TurnLog.append

    async def held(log: TurnLog, interaction: Interaction, *more: Any) -> int | None:
        if interaction.status is Status.FAILED:
            recording.set()
            await go.wait()
        return await append(log, interaction, *more)

    monkeypatch.setattr(TurnLog, "append", held)
    script = play([Reply(sampled("one"), fault=Fault.ERROR, fault_after=1), Reply(sampled("two"))])
    async with serving(tmp_path, script) as server:
        first = asyncio.create_task(ask(server))
        await recording.wait()
        assert await text_of(server, **{"x-stainless-retry-count": "1"}) == "two"
        go.set()
        assert (await first)["error"]["code"] == "engine_failed"


async def test_a_turn_that_could_not_be_committed_takes_no_place_in_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = TurnLog.append
    refusals = [StoreUnavailable("the disk is full")]

    async def refused(log: TurnLog, interaction: Interaction, *more: Any) -> int | None:
        if interaction.parent_id is not None and interaction.status is Status.COMPLETE and refusals:
            raise refusals.pop()
        return await append(log, interaction, *more)

    monkeypatch.setattr(TurnLog, "append", refused)
    async with serving(tmp_path, says("one", "two", "three")) as server:
        messages = [user("hi"), await server.answer([user("hi")]), user("more")]
        body = {"model": "m", "messages": messages}
        assert (await server.post(CHAT, body)).status_code == 503
        await server.chat(messages)
        reasons = [node["reason"] for node in await server.tree() if node["status"] == "complete"]
        assert reasons == ["first", "continued"]
