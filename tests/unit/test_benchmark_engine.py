"""The fake engine of the benchmark: both wires, and its log."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from benchmarks.engine import application
from benchmarks.model import IMAGE, IMAGE_TOKENS, Model, write_model
from benchmarks.scoring import digest

TURN = {"role": "user", "content": "Hello\n[turn 3.0 say]"}
CALL = {"role": "user", "content": "Hello\n[turn 3.0 call search]"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return Model(folder)


@pytest.fixture
async def engine(model: Model) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(application(model))) as client:
        yield client


async def ask(engine: TestClient[Any, Any], path: str, **body: Any) -> Any:
    async with engine.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        if not body.get("stream"):
            return await response.json()
        events = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


async def chat(engine: TestClient[Any, Any], *messages: Any, tokens: int = 96, **more: Any) -> Any:
    told = {"return_token_ids": True, "logprobs": True}
    return await ask(engine, "/v1/chat/completions", messages=messages, max_tokens=tokens, **told, **more)


async def log(engine: TestClient[Any, Any]) -> list[Any]:
    async with engine.get("/bench/log") as response:
        found: list[Any] = await response.json()
    return found


async def test_a_chat_completion_tells_the_ids_that_are_in_the_log(engine: TestClient[Any, Any], model: Model) -> None:
    answer = await chat(engine, TURN, tokens=40)
    (logged,) = await log(engine)
    choice = answer["choices"][0]
    assert answer["prompt_token_ids"] == model.render([TURN], None) and choice["token_ids"] == logged["sampled"]
    assert logged["prompt"] == digest(answer["prompt_token_ids"]) and len(choice["token_ids"]) == 40
    assert choice["message"]["content"] == logged["content"] and len(choice["logprobs"]["content"]) == 40


async def test_a_streamed_answer_is_the_whole_one_in_parts(engine: TestClient[Any, Any], model: Model) -> None:
    await engine.post("/bench/pace", json={"rate": None, "part": 7})
    *parts, usage = await chat(engine, CALL, stream=True, stream_options={"include_usage": True})
    (logged,) = await log(engine)
    choices = [part["choices"][0] for part in parts]
    assert [token for choice in choices for token in choice["token_ids"]] == logged["sampled"]
    assert "".join(choice["delta"]["content"] for choice in choices) == logged["content"]
    assert ["prompt_token_ids" in part for part in parts] == [True] + [False] * (len(parts) - 1)
    call = choices[-1]["delta"]["tool_calls"][0]["function"]
    assert call["name"] == "search" and list(json.loads(call["arguments"])) == ["query"]
    assert choices[-1]["finish_reason"] == "tool_calls" and usage["usage"]["completion_tokens"] == 96
    assert [part[1] for part in logged["parts"]] == [*range(7, 96, 7), 96]


async def test_generate_takes_ids_and_streams_ids_in_parts_of_the_asked_size(
    engine: TestClient[Any, Any], model: Model
) -> None:
    prompt = model.render([CALL], None)
    sampling = {"max_new_tokens": 96, "stream_interval": 40}
    parts = await ask(engine, "/generate", input_ids=prompt, sampling_params=sampling, stream=True)
    (logged,) = await log(engine)
    assert [token for part in parts for token in part["output_ids"]] == logged["sampled"]
    assert [part["meta_info"]["completion_tokens"] for part in parts] == [40, 80, 96]
    assert [entry[1] for part in parts for entry in part["meta_info"]["output_token_logprobs"]] == logged["sampled"]
    assert parts[0]["meta_info"]["finish_reason"] is None and parts[-1]["meta_info"]["finish_reason"]["type"] == "stop"


async def test_completions_of_ids_are_those_of_the_same_chat(engine: TestClient[Any, Any], model: Model) -> None:
    chatted = await chat(engine, TURN, tokens=40)
    prompt = chatted["prompt_token_ids"]
    told = await ask(engine, "/v1/completions", prompt=prompt, max_tokens=40, return_token_ids=True)
    first, again = await log(engine)
    assert told["choices"][0]["prompt_token_ids"] == prompt
    assert (first["attempt"], again["attempt"]) == (0, 1) and first["sampled"] != again["sampled"]


async def test_a_prompt_continues_an_answer_only_with_its_ids(engine: TestClient[Any, Any], model: Model) -> None:
    answer = await chat(engine, TURN, tokens=40)
    ids = [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]
    tail = model.encode("\n<|im_start|>user\nMore\n[turn 3.1 say]<|im_end|>\n<|im_start|>assistant\n")
    await ask(engine, "/generate", input_ids=[*ids, *tail], sampling_params={"max_new_tokens": 40})
    await chat(engine, TURN, answer["choices"][0]["message"], {"role": "user", "content": "More\n[turn 3.2 say]"})
    assert [entry["continues"] for entry in await log(engine)] == [None, [0, 0], None]


async def test_an_image_is_as_many_tokens_on_both_wires(engine: TestClient[Any, Any], model: Model) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    shown = {"role": "user", "content": [image, {"type": "text", "text": TURN["content"]}]}
    expanded = (await chat(engine, shown, tokens=40))["prompt_token_ids"]
    collapsed = model.render([shown], None)
    assert expanded.count(model.id_of(IMAGE)) == IMAGE_TOKENS and collapsed.count(model.id_of(IMAGE)) == 1
    asked = {"image_data": ["data:"], "return_prompt_token_ids": True, "sampling_params": {"max_new_tokens": 40}}
    assert (await ask(engine, "/generate", input_ids=collapsed, **asked))["prompt_token_ids"] == expanded


async def test_a_probe_is_answered_and_not_logged(engine: TestClient[Any, Any], model: Model) -> None:
    answer = await ask(engine, "/generate", input_ids=[1, 2], sampling_params={"max_new_tokens": 1})
    assert len(answer["output_ids"]) == 1 and await log(engine) == []


async def test_a_request_without_a_limit_of_tokens_is_refused(engine: TestClient[Any, Any]) -> None:
    async with engine.post("/v1/chat/completions", json={"messages": [TURN]}) as response:
        assert response.status == 400 and "max_tokens is missing" in await response.text()


async def test_tokenize_renders_as_chat_does(engine: TestClient[Any, Any], model: Model) -> None:
    assert (await ask(engine, "/tokenize", messages=[TURN]))["tokens"] == model.render([TURN], None)
