"""`stop_token_ids` end an answer beside the model's end tokens, none of them before `min_tokens`; both are recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Reply, Script, play
from proxy.types import ids_of
from tests.api.test_streaming import events
from tests.api.test_token_ids import BODIES, CHAT, MESSAGES, RESPONSES
from tests.support import function_tool, sampled, says, serving, tiny_renderer, user
from tests.wide import CROSSED

OWN = tiny_renderer().stop_token_ids
TEXT = "one two three"
IDS = sampled(TEXT).tolist()
LIMITS = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}


def always(text: str = TEXT, chunk: int = 1) -> Script:
    reply = Reply(sampled(text), chunk=chunk)
    return lambda _: reply


@CROSSED
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("chunk", [1, 64])
async def test_a_stop_token_ends_the_answer_beside_the_models_own(tmp_path: Path, path: str, chunk: int) -> None:
    async with serving(tmp_path, always(chunk=chunk)) as server:
        reply = await server.ok(path, {**BODIES[path], "stop_token_ids": [IDS[3], OWN[0]], "return_token_ids": True})
        ids = reply["choices"][0]["token_ids"] if path == CHAT else reply["token_ids"]
        assert ids == IDS[:4]
        assert server.engine.requests[0].stop_token_ids == (*OWN, IDS[3])
        (sample,) = await server.export()
        assert sample["turns"][0]["sampling"]["stop_token_ids"] == [IDS[3], OWN[0]]
        assert sample["finish_reason"] == "stop"
        (node,) = await server.tree()
        assert node["output_tokens"] == 4 and not node["notes"].get("dropped")


async def test_a_turn_goes_on_after_an_answer_that_a_stop_token_ended(tmp_path: Path) -> None:
    async with serving(tmp_path, says(TEXT, "four")) as server:
        answer = await server.answer([user("a")], stop_token_ids=[IDS[3]])
        await server.chat([user("a"), answer, user("b")])
        nodes = await server.tree()
        assert [node["reason"] for node in nodes] == ["first", "continued"] and nodes[1]["aligned"]
        first, second = server.prompts()
        assert second[: len(first) + 4] == [*first, *IDS[:4]]


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_has_at_least_min_tokens(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, always("ok")) as server:
        reply = await server.ok(path, {**BODIES[path], "min_tokens": 20, "return_token_ids": True})
        ids = reply["choices"][0]["token_ids"] if path == CHAT else reply["token_ids"]
        assert len(ids) == 21 and ids[-1] == OWN[0] and not set(ids[:-1]) & set(OWN)
        assert server.engine.requests[0].sampling.min_tokens == 20
        (sample,) = await server.export()
        assert sample["turns"][0]["sampling"]["min_tokens"] == 20
        assert sample["recomputable"] == "bias"


async def test_min_tokens_is_cut_to_the_budget_of_the_turn_and_recorded_so(tmp_path: Path) -> None:
    async with serving(tmp_path, always("ok"), max_tokens_per_turn=5) as server:
        reply = await server.chat([user("hi")], min_tokens=20)
        assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == 5
        sampling = server.engine.requests[0].sampling
        assert (sampling.min_tokens, sampling.max_tokens) == (5, 5)


@CROSSED
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_a_stop_string_counts_from_min_tokens_on(
    tmp_path: Path, stream: bool, chunk: int, logprobs: bool
) -> None:
    """As in vLLM, whose `min_tokens` holds stop strings back too; a replay ends at the same token."""
    text = "no stop, no stop, no stop, no stop"
    ids = sampled(text).tolist()
    ends = [at for at in range(1, len(ids)) if tiny_renderer().decode(ids[:at]).endswith("stop")]
    least = ends[1] - 1
    async with serving(tmp_path, play([Reply(sampled(text), chunk=chunk)])) as server:
        body = {**BODIES[CHAT], "stop": "stop", "min_tokens": least, "return_token_ids": True, "logprobs": logprobs}
        for _ in range(2):
            response = await server.post(CHAT, {**body, "stream": stream}, headers={"idempotency-key": "k"})
            if stream:
                *chunks, _ = events(response.text)
                parts = [part for chunk in chunks for part in chunk["choices"]]
                found = [token for part in parts for token in part.get("token_ids") or ()]
                content = "".join(part["delta"].get("content") or "" for part in parts)
            else:
                (choice,) = response.json()["choices"]
                found, content = choice["token_ids"], choice["message"]["content"]
            assert found == ids[: ends[1]]
            assert content.strip() == "no stop, no"
        (node,) = await server.tree()
        assert node["finish_reason"] == "stop_string"


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"stop_token_ids": [tiny_renderer().vocab_size]}, "stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": "5"}, "min_tokens"),
    ({"min_tokens": 2.5}, "min_tokens"),
]


@CROSSED
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("fields", "param"), ERRORS)
async def test_errors_name_the_field(tmp_path: Path, path: str, fields: dict[str, Any], param: str) -> None:
    async with serving(tmp_path, says()) as server:
        response = await server.post(path, {**BODIES[path], **fields})
        assert response.status_code == 400, response.text
        assert f"'{param}'" in response.json()["error"]["message"]
        assert server.engine.requests == []


@pytest.mark.parametrize("path", BODIES)
async def test_a_minimum_above_the_maximum_is_refused(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, says()) as server:
        response = await server.post(path, {**BODIES[path], "min_tokens": 6, LIMITS[path]: 5})
        assert response.status_code == 400 and "'min_tokens' is 6" in response.json()["error"]["message"]


async def test_a_forced_call_has_no_minimum(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        for more in (
            {"tools": [function_tool("f")], "tool_choice": "required"},
            {"response_format": {"type": "json_object"}},
        ):
            response = await server.post(CHAT, {**BODIES[CHAT], "min_tokens": 6, **more})
            assert response.status_code == 400 and response.json()["error"]["param"] == "min_tokens"


async def test_neither_field_changes_a_turn_that_sends_its_default(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await server.chat([user("hi")], stop_token_ids=[], min_tokens=0)
        await server.chat([user("hi")], stop_token_ids=None, min_tokens=None)
        assert [request.stop_token_ids for request in server.engine.requests] == [OWN, OWN]
        assert [node["output_tokens"] for node in await server.tree()] == [len(IDS)] * 2


async def test_generate_takes_sglangs_name_of_the_minimum(tmp_path: Path) -> None:
    async with serving(tmp_path, play([Reply(ids_of([7, 9])), Reply(ids_of([7, 9]))])) as server:
        for name in ("min_tokens", "min_new_tokens"):
            body = {"input_ids": [1, 2], "sampling_params": {name: 3, "max_new_tokens": 8, "stop_token_ids": [9]}}
            assert (await server.ok("/s/v1/generate", body))["output_ids"] == [7, 7, 7, 9]
        (first, _) = await server.export(layout="individual")
        sampling = first["turns"][0]["sampling"]
        assert (sampling["min_tokens"], sampling["stop_token_ids"]) == (3, [9])
