"""`/v1/generate`: token ids in, token ids out. In a session, a request is a turn like any other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import proxy.turns.turns
from proxy.engine.scripted.scripts import Fault, Reply, Script, play
from proxy.types import ids_of
from tests.support import Server, sampled, says, serving, tiny_renderer, until, user

PATH = "/s/v1/generate"
PROMPT = [72, 101, 108, 108, 111]
END = tiny_renderer().stop_token_ids[0]
VOCABULARY = tiny_renderer().vocab_size


def replies(*outputs: Sequence[int], delay_s: float = 0.0) -> Script:
    """A script of whole answers as token ids, in order."""
    return play([Reply(ids_of(ids), delay_s=delay_s) for ids in outputs])


async def generated(server: Server, ids: Sequence[int], path: str = PATH, **more: Any) -> Any:
    return await server.ok(path, {"input_ids": list(ids), **more})


async def refused(server: Server, body: Any, path: str = PATH, **more: Any) -> Any:
    """The error of a request that is refused with 400."""
    response = await server.post(path, body, **more)
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def until_statuses(server: Server, wanted: list[str]) -> None:
    """Wait until the nodes of the session have these statuses, in any order."""
    for _ in range(1000):
        if sorted(node["status"] for node in await server.tree()) == wanted:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(await server.tree())


async def test_a_reply_has_the_sampled_ids_with_their_logprobs_and_versions(tmp_path: Path) -> None:
    async with serving(tmp_path, replies([10, 11, END])) as server:
        await server.ok("/engine/update_weights", {"path": "w", "version": 6})
        reply = await generated(server, PROMPT)
        assert reply["output_ids"] == [10, 11, END] and reply["versions"] == [6, 6, 6]
        assert [round(math.exp(value), 5) for value in reply["logprobs"]] == [0.5] * 3
        assert (reply["finish_reason"], reply["prompt_tokens"]) == ("stop", len(PROMPT))
        (node,) = await server.tree()
        assert (node["id"], node["api"], node["reason"]) == (reply["id"], "generate", "first")
        assert server.prompts() == [PROMPT]


@pytest.mark.parametrize("path", [PATH, "/s/generate"])
@pytest.mark.parametrize("name", ["input_ids", "prompt_ids"])
async def test_both_names_of_the_prompt_and_both_paths_work(tmp_path: Path, path: str, name: str) -> None:
    async with serving(tmp_path, replies([10, END])) as server:
        assert (await server.ok(path, {name: PROMPT}))["output_ids"] == [10, END]
        assert [node["prompt_tokens"] for node in await server.tree()] == [len(PROMPT)]


async def test_a_prompt_that_begins_with_an_earlier_turn_continues_it_in_one_sample(tmp_path: Path) -> None:
    async with serving(tmp_path, replies([10, 11, END], [12, END], [13])) as server:
        first = await generated(server, PROMPT)
        longer = [*PROMPT, 10, 11, END, 50, 51]
        second = await generated(server, longer)
        third = await generated(server, [*longer, 12, END, 52], sampling_params={"max_new_tokens": 1})
        assert third["finish_reason"] == "length"
        nodes = await server.tree()
        assert [node["reason"] for node in nodes] == ["first", "continued", "continued"]
        assert [node["parent_id"] for node in nodes] == [None, first["id"], second["id"]]
        assert all(node["aligned"] for node in nodes[1:])
        (sample,) = await server.export()
        assert sample["input_ids"] == [*longer, 12, END, 52, 13]
        assert sample["loss_mask"] == [0] * 5 + [1] * 3 + [0] * 2 + [1] * 2 + [0] + [1]


async def test_an_equal_prompt_is_resampled_and_another_continuation_branches(tmp_path: Path) -> None:
    async with serving(tmp_path, replies([10, END], [20, END], [21, END], [22, END])) as server:
        first = await generated(server, PROMPT)
        longer = [*PROMPT, 10, END, 60]
        for ids in (longer, longer, [*PROMPT, 10, END, 61]):
            await generated(server, ids)
        nodes = await server.tree()
        assert [node["reason"] for node in nodes] == ["first", "continued", "resampled", "branched"]
        assert {node["parent_id"] for node in nodes[1:]} == {first["id"]}
        samples = await server.export()
        assert [sample["input_ids"][-3:] for sample in samples] == [[60, 20, END], [60, 21, END], [61, 22, END]]
        assert [sum(sample["loss_mask"]) for sample in samples] == [4, 2, 2]  # the first turn is trained once


async def test_an_unrelated_prompt_is_a_new_root(tmp_path: Path) -> None:
    async with serving(tmp_path, replies([10, END], [11, END], [12, END])) as server:
        await generated(server, PROMPT)
        await generated(server, [*PROMPT, 10, 60])  # without the sampled end token, so it is no prefix
        await generated(server, PROMPT[:-1])
        assert [node["reason"] for node in await server.tree()] == ["first", "new_root", "new_root"]
        assert len(await server.export()) == 3


async def test_different_ids_of_equal_text_are_different_conversations(tmp_path: Path) -> None:
    renderer = tiny_renderer()
    whole = list(renderer.encode("hello hello"))
    bytewise = [token for byte in "hello hello" for token in renderer.encode(byte)]
    assert whole != bytewise and renderer.decode(ids_of(bytewise)) == "hello hello"
    async with serving(tmp_path, replies([10, END], [11, END])) as server:
        await generated(server, whole)
        await generated(server, bytewise)
        assert [node["reason"] for node in await server.tree()] == ["first", "new_root"]


async def test_ids_continue_the_chat_turn_that_they_begin_with(tmp_path: Path) -> None:
    async with serving(tmp_path, says("hi there", "fine", "bye")) as server:
        chat = await server.chat([user("hello")])
        ids = [*server.prompts()[0], *sampled("hi there"), 40, 41]
        reply = await generated(server, ids)
        again = await generated(server, [*ids, *reply["output_ids"], 42])
        nodes = await server.tree()
        assert [node["parent_id"] for node in nodes] == [None, chat["id"], reply["id"]]
        assert [node["api"] for node in nodes] == ["chat", "generate", "generate"]
        (sample,) = await server.export()
        assert sample["input_ids"] == [*ids, *reply["output_ids"], 42, *again["output_ids"]]


async def test_a_chat_continues_beside_ids_in_one_session(tmp_path: Path) -> None:
    async with serving(tmp_path, says("hi there", "by ids", "by chat")) as server:
        chat = await server.chat([user("hello")])
        answer = chat["choices"][0]["message"]
        await generated(server, [*server.prompts()[0], *sampled("hi there"), 40])
        await server.chat([user("hello"), answer, user("and?")])
        nodes = await server.tree()
        assert [node["reason"] for node in nodes] == ["first", "continued", "branched"]
        assert [node["parent_id"] for node in nodes] == [None, chat["id"], chat["id"]]
        assert server.prompts()[2][: len(server.prompts()[0])] == server.prompts()[0]


async def test_a_chat_with_the_text_of_ids_is_rendered_and_never_continues_them(tmp_path: Path) -> None:
    raw = list(tiny_renderer().encode("hello"))
    async with serving(tmp_path, says("hi", "right", "right")) as server:
        await generated(server, raw)
        messages = [user("hello"), {"role": "assistant", "content": "hi"}, user("and?")]
        await server.chat(messages)
        await server.chat(messages, session="alone")
        assert server.prompts()[1] == server.prompts()[2]  # as in a session without the ids
        assert [node["parent_id"] for node in await server.tree()] == [None, None]


async def test_of_several_matching_prefixes_the_deepest_is_continued(tmp_path: Path) -> None:
    async with serving(tmp_path, replies([10, END], [11, END], [12, END])) as server:
        await generated(server, PROMPT)
        whole = await generated(server, [*PROMPT, 10, END, 60])
        deep = [*PROMPT, 10, END, 60, 11, END]
        await generated(server, [*deep, 61])
        assert (await server.tree())[2]["parent_id"] == whole["id"]


async def test_a_restart_between_two_turns_loses_nothing(tmp_path: Path) -> None:
    longer = [*PROMPT, 10, 11, END, 50]
    async with serving(tmp_path, replies([10, 11, END])) as server:
        first = await generated(server, PROMPT)
    async with serving(tmp_path, replies([12, END], [13, END])) as server:
        retried = await server.post(PATH, {"input_ids": PROMPT}, headers={"x-stainless-retry-count": "1"})
        assert retried.json() == first and server.engine.requests == []
        second = await generated(server, longer)
        await generated(server, longer)
    async with serving(tmp_path, replies([14, END])) as server:
        await generated(server, [*longer, 12, END, 51])
        nodes = await server.tree()
        assert [node["reason"] for node in nodes] == ["first", "continued", "resampled", "continued"]
        assert [node["parent_id"] for node in nodes] == [None, first["id"], first["id"], second["id"]]
        samples = await server.export()
        ends = {tuple(sample["input_ids"]) for sample in samples}
        assert ends == {(*longer, 13, END), (*longer, 12, END, 51, 14, END)}


async def test_a_generate_turn_has_rewards_and_returns(tmp_path: Path) -> None:
    async with serving(tmp_path, replies([10, END], [11, END])) as server:
        first = await generated(server, PROMPT)
        second = await generated(server, [*PROMPT, 10, END, 60])
        await server.ok("/s/rl/set_reward", {"interaction_id": second["id"], "reward": 2.0})
        samples = await server.export(layout="individual", discount=0.5)
        assert {s["interaction_id"]: s["rewards"][0] for s in samples} == {first["id"]: 1.0, second["id"]: 2.0}


async def test_an_ended_session_refuses_generate(tmp_path: Path) -> None:
    async with serving(tmp_path, replies([10, END])) as server:
        await generated(server, PROMPT)
        await server.ok("/s/rl/end_session", {})
        response = await server.post(PATH, {"input_ids": PROMPT})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "session_closed")


async def test_concurrent_turns_are_siblings_and_none_is_lost(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda request: Reply(sampled("x"), delay_s=0.001)) as server:
        found = await asyncio.gather(*(generated(server, PROMPT) for _ in range(20)))
        assert len({reply["id"] for reply in found}) == 20
        assert sorted(node["reason"] for node in await server.tree()) == ["first", *["resampled"] * 19]


async def test_ids_without_text_are_recorded_exactly(tmp_path: Path) -> None:
    every = [*range(VOCABULARY)]
    async with serving(tmp_path, replies(every[:END], [10, END])) as server:
        await generated(server, every)
        await generated(server, [*every, *every[:END], 7])
        assert [node["reason"] for node in await server.tree()] == ["first", "continued"]
        (sample,) = await server.export()
        assert sample["input_ids"] == [*every, *every[:END], 7, 10, END]


# Sampling ----------------------------------------------------------------------------------------------------------


async def test_stop_tokens_of_the_request_replace_those_of_the_model(tmp_path: Path) -> None:
    async with serving(tmp_path, replies([10, END, 77, 11], [10, END, 11])) as server:
        reply = await generated(server, PROMPT, sampling_params={"stop_token_ids": [77]})
        assert (reply["output_ids"], reply["finish_reason"]) == ([10, END, 77], "stop")
        assert server.engine.requests[0].stop_token_ids == (77,)
        free = await generated(server, [9], sampling_params={"stop_token_ids": []})
        assert (free["output_ids"], free["finish_reason"]) == ([10, END, 11], "length")


async def test_ignore_eos_continues_after_an_end_token(tmp_path: Path) -> None:
    async with serving(tmp_path, replies([10, END, 11, END], [12, END])) as server:
        params = {"ignore_eos": True, "max_new_tokens": 4}
        reply = await generated(server, PROMPT, sampling_params=params)
        assert (reply["output_ids"], reply["finish_reason"]) == ([10, END, 11, END], "length")
        assert server.engine.requests[0].stop_token_ids == ()
        await generated(server, [*PROMPT, 10, END, 11, END, 60])
        (sample,) = await server.export()
        assert sample["loss_mask"] == [0] * 5 + [1] * 4 + [0] + [1] * 2


async def test_sampling_reaches_the_engine_under_either_name(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda request: Reply(sampled("x" * 50))) as server:
        names = {"max_new_tokens": 3, "sampling_seed": 7, "temperature": 0.25, "top_p": 0.5, "top_k": 9}
        reply = await generated(server, PROMPT, sampling_params=names)
        assert (len(reply["output_ids"]), reply["finish_reason"]) == (3, "length")
        sampling = server.engine.requests[0].sampling
        assert (sampling.max_tokens, sampling.seed, sampling.temperature) == (3, 7, 0.25)
        assert (sampling.top_p, sampling.top_k) == (0.5, 9)
        await generated(server, PROMPT, sampling_params={"max_tokens": 2, "seed": 8})
        assert (server.engine.requests[1].sampling.max_tokens, server.engine.requests[1].sampling.seed) == (2, 8)


async def test_a_stop_string_ends_sampling_in_a_session(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one two three")) as server:
        reply = await generated(server, PROMPT, sampling_params={"stop": ["two"]})
        assert reply["finish_reason"] == "stop" and END not in reply["output_ids"]
        assert tiny_renderer().decode(ids_of(reply["output_ids"])) == "one two"


async def test_the_sampling_defaults_and_limits_of_the_session_apply(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda request: Reply(sampled("x" * 90))) as server:
        limits = {"max_tokens_per_turn": 4, "max_turns": 2}
        await server.ok("/rl/start_session", {"session_id": "s", "sampling": {"temperature": 0.5}, "limits": limits})
        assert len((await generated(server, PROMPT))["output_ids"]) == 4
        await generated(server, PROMPT, sampling_params={"temperature": 0.75})
        assert [request.sampling.temperature for request in server.engine.requests] == [0.5, 0.75]
        response = await server.post(PATH, {"input_ids": PROMPT})
        assert response.json()["error"]["code"] == "session_limit_reached"


@pytest.mark.parametrize("path", [PATH, "/v1/generate"])
async def test_a_full_context_is_refused_and_a_nearly_full_one_limits_the_output(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, lambda request: Reply(sampled("x" * 90)), max_context_tokens=50) as server:
        error = await refused(server, {"input_ids": [7] * 50}, path)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input_ids")
        reply = await generated(server, [7] * 47, path)
        assert (len(reply["output_ids"]), reply["finish_reason"]) == (3, "length")


@pytest.mark.parametrize("path", [PATH, "/v1/generate"])
async def test_the_servers_token_limit_per_turn_applies(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, lambda request: Reply(sampled("x" * 90)), max_tokens_per_turn=5) as server:
        for asked, given in ((None, 5), (9, 5), (5, 5), (3, 3)):
            more = {} if asked is None else {"sampling_params": {"max_new_tokens": asked}}
            assert len((await generated(server, PROMPT, path, **more))["output_ids"]) == given


# Bad input ---------------------------------------------------------------------------------------------------------

BAD: list[tuple[Any, str]] = [
    ({}, "input_ids"),
    ({"input_ids": None}, "input_ids"),
    ({"input_ids": []}, "input_ids"),
    ({"prompt_ids": []}, "prompt_ids"),
    ({"input_ids": "1 2 3"}, "input_ids"),
    ({"input_ids": {"0": 1}}, "input_ids"),
    ({"input_ids": ["1"]}, "input_ids"),
    ({"input_ids": [1, 2.0]}, "input_ids"),
    ({"input_ids": [1, True]}, "input_ids"),
    ({"input_ids": [1, None]}, "input_ids"),
    ({"input_ids": [[1, 2]]}, "input_ids"),
    ({"input_ids": [1, -1]}, "input_ids"),
    ({"input_ids": [1, VOCABULARY]}, "input_ids"),
    ({"prompt_ids": [1, VOCABULARY]}, "prompt_ids"),
    ({"input_ids": [1, 2**31 - 1]}, "input_ids"),
    ({"input_ids": [1, 2**31]}, "input_ids"),
    ({"input_ids": [1, 2**70]}, "input_ids"),
    ({"input_ids": [1], "prompt_ids": [1]}, "input_ids"),
    ({"text": "hello"}, "text"),
    ({"input_ids": [1], "stream": True}, "stream"),
    ({"input_ids": [1], "n": 2}, "n"),
    ({"input_ids": [1], "sampling_params": []}, "sampling_params"),
    ({"input_ids": [1], "sampling_params": "x"}, "sampling_params"),
    ({"input_ids": [1], "sampling_params": {"n": 2}}, "sampling_params.n"),
    ({"input_ids": [1], "sampling_params": {"n": 0}}, "sampling_params.n"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": "9"}}, "sampling_params.max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"input_ids": [1], "sampling_params": {"sampling_seed": "x"}}, "sampling_params.sampling_seed"),
    ({"input_ids": [1], "sampling_params": {"ignore_eos": 1}}, "sampling_params.ignore_eos"),
    ({"input_ids": [1], "sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
    ({"input_ids": [1], "sampling_params": {"json_schema": "{}"}}, "sampling_params.json_schema"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": 5}}, "sampling_params.stop_token_ids"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": ["a"]}}, "sampling_params.stop_token_ids"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": [-3]}}, "sampling_params.stop_token_ids"),
    ({"input_ids": [1], "sampling_params": {"max_tokens": 5, "max_new_tokens": 9}}, "sampling_params.max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"sampling_seed": 2**63}}, "sampling_params.sampling_seed"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": [1] * 65}}, "sampling_params.stop_token_ids"),
    ({"input_ids": [1], "sampling_params": {"stop": [""]}}, "sampling_params.stop"),
    ({"input_ids": [1], "sampling_params": {"logit_bias": {"a": 1}}}, "sampling_params.logit_bias"),
    ({"input_ids": [1], "sampling_params": {"logit_bias": {str(VOCABULARY): 1}}}, "sampling_params.logit_bias"),
    ({"input_ids": [1], "request_id": 5}, "request_id"),
    ([1, 2], "body"),
]


async def test_a_wrong_field_is_named_and_the_engine_never_sees_it(tmp_path: Path) -> None:
    wrong = []
    async with serving(tmp_path, lambda request: Reply(sampled("x"))) as server:
        for body, param in BAD:
            for path in (PATH, "/v1/generate"):
                response = await server.post(path, body)
                named = response.json().get("error", {}).get("param")
                if (response.status_code, named, server.engine.requests) != (400, param, []):
                    wrong.append((path, str(body)[:300], response.text))
        assert not wrong, wrong
        assert (await server.http.get("/rl/sessions")).json()["sessions"] == []  # a refusal leaves no session behind
        assert (await generated(server, PROMPT))["output_ids"] == list(sampled("x"))


# Retries -----------------------------------------------------------------------------------------------------------

MARKS: list[dict[str, str]] = [{"x-stainless-retry-count": "1"}, {"idempotency-key": "k"}]


@pytest.mark.parametrize("mark", MARKS)
async def test_a_marked_retry_is_replayed_and_an_unmarked_one_sampled(tmp_path: Path, mark: dict[str, str]) -> None:
    async with serving(tmp_path, replies([10, END], [11, END])) as server:
        body = {"input_ids": PROMPT}
        first = (await server.post(PATH, body, headers=mark)).json()
        assert (await server.post(PATH, body, headers=mark)).json() == first
        assert len(server.engine.requests) == 1
        assert (await generated(server, PROMPT))["output_ids"] == [11, END]


async def test_different_ids_or_stop_tokens_are_no_retry(tmp_path: Path) -> None:
    mark = {"x-stainless-retry-count": "1"}
    async with serving(tmp_path, replies([10, END], [11, END], [12, END])) as server:
        bodies = [{"input_ids": PROMPT}, {"input_ids": PROMPT[1:]}]
        bodies.append({"input_ids": PROMPT, "sampling_params": {"stop_token_ids": [END]}})
        outputs = [(await server.ok(PATH, body, headers=mark))["output_ids"][0] for body in bodies]
        assert outputs == [10, 11, 12]


async def test_a_failed_attempt_is_superseded_by_the_next(tmp_path: Path) -> None:
    failing = Reply(sampled("one"), fault=Fault.ERROR, fault_after=1)
    async with serving(tmp_path, play([failing, Reply(sampled("two"))])) as server:
        response = await server.post(PATH, {"input_ids": PROMPT})
        assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_failed")
        assert (await generated(server, PROMPT))["output_ids"] == list(sampled("two"))
        await until_statuses(server, ["complete", "superseded"])
        assert len(await server.export()) == 1


# Clients and keys --------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_frees_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy.turns.turns, "GRACE_S", 0.01)
    hanging = Reply(sampled("one two"), fault=Fault.HANG, fault_after=1)
    async with serving(tmp_path, lambda request: hanging) as server:
        for path in (PATH, "/v1/generate"):
            asking = asyncio.create_task(server.post(path, {"input_ids": PROMPT}))
            await until(lambda: len(server.engine.running) == 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: not server.engine.running)
        await until_statuses(server, ["aborted"])


async def test_on_a_keyed_server_the_key_chooses_the_session(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda request: Reply(sampled("x")), admin_key="admin") as server:
        admin = {"authorization": "Bearer admin"}
        started = await server.ok("/rl/start_session", {"session_id": "s"}, headers=admin)
        own = {"authorization": f"Bearer {started['api_key']}"}
        body = {"input_ids": PROMPT}
        for path in ("/v1/generate", PATH):
            for headers in ({}, {"authorization": "Bearer wrong"}):
                assert (await server.post(path, body, headers=headers)).status_code == 401
        assert server.engine.requests == []
        await server.ok("/v1/generate", body, headers=admin)  # not recorded
        tree = (await server.http.get("/rl/sessions/s", headers=admin)).json()["interactions"]
        assert tree == []
        for path, headers in (("/v1/generate", own), (PATH, own), (PATH, admin)):
            await server.ok(path, body, headers=headers)
        capability = started["base_url"].removeprefix("http://t") + "/generate"
        await server.ok(capability, body)
        tree = (await server.http.get("/rl/sessions/s", headers=admin)).json()["interactions"]
        assert [node["status"] for node in tree] == ["complete"] * 4
        assert (await server.post("/nobody/v1/generate", body, headers=admin)).status_code == 404
        assert (await server.post("/nobody/v1/generate", body, headers=own)).status_code == 401


@pytest.mark.parametrize("path", [PATH, "/v1/generate"])
async def test_the_engine_is_asked_for_the_whole_reply_at_once(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, replies([10, END])) as server:
        await generated(server, PROMPT, path)
        assert [request.streamed for request in server.engine.requests] == [False]
