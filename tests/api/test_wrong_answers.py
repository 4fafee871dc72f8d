"""An engine that answers wrong fails its turn by name: nothing of it is trained, and the session goes on."""

from __future__ import annotations

import math
from array import array
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Reply
from proxy.types import ids_of
from tests.api.test_engine_control import serving_on
from tests.support import Server, sampled, tiny_renderer, user

BAD_ID = 1_000_000
ANSWER = sampled("one two three")
MOST = len(ANSWER)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "id too large": ({"ids": ids_of([BAD_ID])}, "token 1000000"),
    "negative id": ({"ids": ids_of([-1])}, "token -1"),
    "nan": ({"logprobs": array("f", [math.nan])}, "a logprob is NaN"),
    "infinite": ({"logprobs": array("f", [math.inf])}, "a logprob is infinite"),
    "minus infinite": ({"logprobs": array("f", [-math.inf])}, "a logprob is infinite"),
    "positive": ({"logprobs": array("f", [0.5])}, "logprob 0.5"),
    "no logprob": ({"logprobs": array("f")}, "0 logprobs for 1 tokens"),
    "too many": ({"ids": ids_of([5] * MOST), "logprobs": array("f", [-1.0] * MOST)}, "more than it was asked for"),
}


class WrongEngine(ScriptedEngine):
    """Says ANSWER a token a time. While `wrong` is set, it changes the third chunk."""

    def __init__(self, wrong: dict[str, Any], vocab_size: int = tiny_renderer().vocab_size) -> None:
        super().__init__(lambda _: Reply(ANSWER), vocab_size=vocab_size)
        self.wrong = wrong

    async def generate(self, request: GenerateRequest) -> Any:
        at = 0
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                at += 1
                yield replace(chunk, **self.wrong) if at == 3 else chunk


def body(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": MOST, "messages": list(messages), **more}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_answer_fails_its_turn_and_is_never_trained(tmp_path: Path, name: str) -> None:
    wrong, named = WRONG[name]
    engine = WrongEngine(wrong)
    async with serving_on(tmp_path, engine) as server:
        unary = await server.post("/s/v1/chat/completions", body(user("hi")))
        assert unary.status_code == 502 and unary.json()["error"]["code"] == "engine_failed"
        assert named in unary.json()["error"]["message"]
        streamed = await server.post("/s/v1/messages", body(user("hello"), stream=True))
        assert named in streamed.text and "event: error" in streamed.text and "message_stop" not in streamed.text
        outside = await server.post("/v1/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": MOST}})
        assert outside.status_code == 502 and named in outside.json()["error"]["message"]
        failed = await server.tree()
        assert [turn["status"] for turn in failed] == ["failed", "failed"] and engine.running == []
        assert all(named in turn["error"] and turn["output_tokens"] == 2 for turn in failed)
        engine.wrong = {}
        await server.answer([user("hi")])
        [sample] = await server.export()
        assert sum(sample["loss_mask"]) == MOST and max(sample["input_ids"]) < BAD_ID


@pytest.fixture
async def stained(tmp_path: Path) -> Any:
    """A session with a turn that has the token BAD_ID, which an engine with a larger vocabulary sampled."""
    async with serving_on(tmp_path, WrongEngine({"ids": ids_of([BAD_ID])}, BAD_ID + 1)) as server:
        answer = await server.answer([user("hi")])
    async with serving_on(tmp_path, WrongEngine({})) as later:
        yield later, answer


async def test_a_history_with_a_token_outside_of_the_vocabulary_is_rendered_anew(stained: tuple[Server, Any]) -> None:
    server, answer = stained
    messages = [user("hi"), answer, user("go on")]
    more = await server.answer(messages)
    messages += [more, user("again")]
    await server.answer(messages)
    asked = [max(prompt) for prompt in server.prompts()]
    assert len(asked) == 2 and max(asked) < tiny_renderer().vocab_size
    tree = await server.tree()
    assert [(turn["reason"], turn["aligned"]) for turn in tree] == [
        ("first", False), ("template", False), ("continued", True),
    ]  # fmt: skip
    assert tree[1]["parent_id"] == tree[0]["id"]


async def test_ids_that_the_client_sends_are_refused_by_name(stained: tuple[Server, Any]) -> None:
    server, _ = stained
    refused = await server.post("/s/v1/generate", {"input_ids": [1, BAD_ID], "sampling_params": {"max_new_tokens": 4}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input_ids"
    assert f"token {BAD_ID}" in refused.json()["error"]["message"]
