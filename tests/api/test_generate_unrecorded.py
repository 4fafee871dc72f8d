"""`/v1/generate` without a session: nothing is recorded, and the engine gets the same request."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from tests.api.test_generate import END, PROMPT, generated, refused, replies
from tests.support import sampled, says, serving, tiny_renderer

PATH = "/v1/generate"


async def test_without_a_session_nothing_is_recorded(tmp_path: Path) -> None:
    async with serving(tmp_path, replies([10, 11, END])) as server:
        reply = await generated(server, PROMPT, PATH, request_id="r1")
        assert (reply["output_ids"], reply["versions"]) == ([10, 11, END], [0, 0, 0])
        assert (len(reply["logprobs"]), reply["finish_reason"]) == (3, "stop")
        assert (await server.http.get("/rl/sessions")).json()["sessions"] == []


async def test_requests_of_one_request_id_share_a_routing_key_that_no_session_has(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda request: Reply(sampled("x"))) as server:
        for name in ("s", "s", "other", None):
            await generated(server, PROMPT, PATH, request_id=name)
        await generated(server, PROMPT)
        told = [request.session_id for request in server.engine.requests]
        assert told[0] == told[1] and "s" in told[0]
        assert len({told[0], told[2], told[3], told[4]}) == 4
        assert told[3] == "" and told[4] == "s"


async def test_without_a_session_stop_tokens_and_ignore_eos_reach_the_engine(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda request: Reply(sampled("x"))) as server:
        for params in ({}, {"stop_token_ids": [5, 6]}, {"ignore_eos": True}, {"stop_token_ids": []}):
            await generated(server, PROMPT, PATH, sampling_params=params)
        own = tiny_renderer().stop_token_ids
        assert [request.stop_token_ids for request in server.engine.requests] == [own, (5, 6), (), ()]


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.CUT, Fault.BAD_LENGTHS])
async def test_without_a_session_a_failing_engine_is_502(tmp_path: Path, fault: Fault) -> None:
    async with serving(tmp_path, play([Reply(sampled("one two"), fault=fault, fault_after=1)])) as server:
        response = await server.post(PATH, {"input_ids": PROMPT})
        assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_failed")


async def test_a_stop_string_without_a_session_is_refused_by_name(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        error = await refused(server, {"input_ids": [1], "sampling_params": {"stop": "x"}}, PATH)
        assert error["param"] == "sampling_params.stop" and "session" in error["message"]
