"""Sampling over HTTP under verl's names: with a session every call is a turn, without one nothing is recorded."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import real_server, says, serving, tiny_renderer, user
from tokengrove.client import AsyncClient, Client, ServerUnreachable
from tokengrove.errors import InvalidRequest, Unauthorized, UnsupportedParameter
from tokengrove.verl import AsyncLLMServerManager, PromptTooLong, ServerTokenizer, SingleTurnAgentLoop
from tokengrove.verl.server_manager import Placement

KEY = "the-admin-key"
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def config(**rollout: Any) -> dict[str, Any]:
    return {"actor_rollout_ref": {"rollout": {"prompt_length": 64, "response_length": 8, **rollout}}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("manager"), admin_key=KEY) as address:
        yield address


async def test_each_call_in_a_session_is_a_turn_with_these_tokens(url: str) -> None:
    async with AsyncClient(url, KEY) as client, client.session("t") as session:
        manager = AsyncLLMServerManager(config(), session)
        prompt = await manager.tokenize([user("hi")])
        first = await manager.generate("r", prompt_ids=prompt, sampling_params=SAMPLING)
        second = await manager.generate(
            request_id="r",
            prompt_ids=prompt + first + [198],
            sampling_params={**SAMPLING, "max_new_tokens": np.int64(3)},
        )
        sample = (await client.export(session_id=session.session_id)).samples[0]
    assert (len(first), len(second)) == (8, 3)
    assert sample.input_ids.tolist() == prompt + first + [198] + second
    assert sample.loss_mask.tolist() == [0] * len(prompt) + [1] * 8 + [0] + [1] * 3
    assert first.log_probs == pytest.approx(sample.logprobs[len(prompt) : len(prompt) + 8].tolist())
    assert (first.stop_reason, first.finish_reason) == ("completed", "length")
    assert first.extra_fields["min_global_steps"] == first.extra_fields["max_global_steps"] == 0
    assert first.extra_fields["logprobs_of"] == "rule"
    assert sample.interaction_ids == (first.interaction_id, second.interaction_id)


async def test_calls_without_a_session_are_not_recorded(url: str) -> None:
    async with AsyncLLMServerManager(config(), [url], admin_key=KEY) as manager:
        output = await manager.generate("r", prompt_ids=[1, 2, 3], sampling_params={"max_tokens": 2, "logprobs": False})
    assert len(output) == 2
    assert output.log_probs is None
    with Client(url, KEY) as client:
        before = len(client.sessions())
    async with AsyncLLMServerManager(None, url) as manager:
        with pytest.raises(Unauthorized):
            await manager.generate("r", prompt_ids=[1, 2, 3], sampling_params={})
    with Client(url, KEY) as client:
        assert len(client.sessions()) == before


@pytest.mark.parametrize(
    ("rollout", "prompt", "tokens"),
    [({}, 64, 8), ({}, 70, 2), ({"max_model_len": 50}, 45, 4), ({"prompt_length": 3, "response_length": 4}, 3, 4)],
)
async def test_the_room_for_a_response_is_verls(url: str, rollout: dict[str, Any], prompt: int, tokens: int) -> None:
    async with AsyncLLMServerManager(config(**rollout), url, admin_key=KEY) as manager:
        assert len(await manager.generate("r", prompt_ids=[5] * prompt, sampling_params={})) == tokens


@pytest.mark.parametrize(("rollout", "prompt"), [({}, 72), ({"max_model_len": 50}, 49)])
async def test_a_prompt_without_room_for_a_response_is_refused(url: str, rollout: dict[str, Any], prompt: int) -> None:
    async with AsyncLLMServerManager(config(**rollout), url, admin_key=KEY) as manager:
        with pytest.raises(PromptTooLong, match=f"{prompt} tokens") as raised:
            await manager.generate("r", prompt_ids=[5] * prompt, sampling_params={})
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"image_data": ["data:image/png;base64,AAAA"]}, InvalidRequest, "image_data"),
        ({"image_data": ["data:"], "mm_processor_kwargs": {"fps": 2}}, UnsupportedParameter, "mm_processor_kwargs"),
        ({"video_data": ["a video"]}, UnsupportedParameter, "video_data"),
        ({"mm_processor_output": [{}]}, UnsupportedParameter, "mm_processor_output"),
        ({"sampling_params": {"prompt_logprobs": 1}}, UnsupportedParameter, "prompt_logprobs"),
        ({"sampling_params": {"temprature": 1}}, InvalidRequest, "temprature"),
        ({"sampling_params": {"n": 2}}, InvalidRequest, "n"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    url: str, arguments: dict[str, Any], error: type[Exception], named: str
) -> None:
    async with AsyncLLMServerManager(config(), url, admin_key=KEY) as manager:
        with pytest.raises(error, match=f"'(sampling_params.)?{named}'"):
            await manager.generate("r", **{"prompt_ids": [1], "sampling_params": {}, **arguments})


async def test_what_means_nothing_here_has_no_effect(url: str) -> None:
    params = {"max_tokens": 2, "skip_special_tokens": True, "seed": None, "stop_token_ids": []}
    async with AsyncLLMServerManager(config(), url, admin_key=KEY) as manager:
        output = await manager.generate(
            "r",
            prompt_ids=np.array([1, 2]),  # type: ignore[arg-type]
            sampling_params=params,
            image_data=[],
            video_data=None,
            mm_processor_kwargs={},
            priority=7,
        )
    assert len(output) == 2


async def test_stop_tokens_end_an_answer_beside_those_of_the_model(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three")) as server, AsyncClient(app=server.app) as client:
        manager = AsyncLLMServerManager(config(), client)
        for stop in ({}, {"stop_token_ids": []}, {"stop_token_ids": [9]}):
            await manager.generate("r", prompt_ids=[1], sampling_params=stop)
        models = await client.end_token_ids()
    assert models == list(tiny_renderer().stop_token_ids)
    asked = [set(request.stop_token_ids) for request in server.engine.requests]
    assert asked == [set(models), set(models), {9, *models}]


@pytest.mark.parametrize("handles", [[], 3, [None]])
def test_a_manager_needs_servers(handles: Any) -> None:
    with pytest.raises(InvalidRequest, match="server"):
        AsyncLLMServerManager(config(), handles)


async def test_a_manager_of_addresses_may_be_sent_to_another_process(url: str) -> None:
    sent = pickle.dumps(AsyncLLMServerManager(config(response_length=5), [url], admin_key=KEY))
    async with pickle.loads(sent) as manager:
        assert len(await manager.generate("r", prompt_ids=[1, 2, 3], sampling_params=SAMPLING)) == 5
    async with AsyncClient(url, KEY) as client:
        with pytest.raises(InvalidRequest, match="create it from addresses"):
            pickle.dumps(AsyncLLMServerManager(config(), client))


async def test_a_request_id_stays_with_its_server_and_a_new_one_goes_where_the_fewest_run() -> None:
    placement = Placement(3, 10)
    async with placement.running("a") as first, placement.running("b") as second, placement.running("c") as third:
        assert {first, second, third} == {0, 1, 2}
        async with placement.running("a") as again:
            assert again == first
            async with placement.running("d") as other:
                assert other != first
    async with placement.running("c") as later:
        assert later == third


async def test_the_server_of_a_request_id_is_forgotten_after_many_others() -> None:
    placement = Placement(2, 2)
    async with placement.running("a") as first:
        async with placement.running("b") as second, placement.running("c") as third:
            assert second != first
            assert third == first  # the lower one of two with one running each
        async with placement.running("a") as again:
            assert again != first


async def test_the_tokens_of_a_single_turn_are_those_of_its_session(url: str) -> None:
    async with AsyncClient(url, KEY) as client, client.session("t") as session:
        loop = SingleTurnAgentLoop(config(), AsyncLLMServerManager(config(), session), None)
        output = await loop.run([user("hi")], SAMPLING)
        again = await loop.run(dict(SAMPLING), raw_prompt=[user("hi")])
        sample = (await client.export(session_id=session.session_id)).samples[0]
    assert sample.input_ids.tolist() == output.prompt_ids + output.response_ids
    assert sample.logprobs[len(output.prompt_ids) :].tolist() == pytest.approx(output.logprobs)
    assert (output.response_mask, output.num_turns, output.stop_reason) == ([1] * 8, 2, "length")
    assert again.prompt_ids == output.prompt_ids
    assert output.metrics.generate_sequences > 0


async def test_an_answer_beyond_the_response_length_is_cut(url: str) -> None:
    async with AsyncClient(url, KEY) as client, client.session("t") as session:
        loop = SingleTurnAgentLoop(config(response_length=5), AsyncLLMServerManager(config(), session), None)
        output = await loop.run([user("hi")], {"max_tokens": 7})
    assert (len(output.response_ids), len(output.response_mask), len(output.logprobs)) == (5, 5, 5)
    assert output.stop_reason == "response_length"


async def test_a_tokenizer_over_http_renders_as_the_server_does(url: str) -> None:
    def check() -> None:
        with Client(url, KEY) as client, client.session("t") as session:
            tokenizer = ServerTokenizer(session)
            asked = [user("hi")]
            ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=True)
            assert ids == session.tokenize(asked)
            assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer.apply_chat_template(asked, tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"
            assert tokenizer.apply_chat_template([{}], add_generation_prompt=False, tokenize=True) == []
            results = [{"role": "tool", "content": "R1"}, {"role": "tool", "content": "R2"}]
            text = tokenizer.apply_chat_template(results, add_generation_prompt=True, tokenize=False)
            assert text == (
                "\n<|im_start|>user\n<tool_response>\nR1\n</tool_response>\n<tool_response>\nR2\n</tool_response>"
                "<|im_end|>\n<|im_start|>assistant\n"
            )
            assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
            found = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)
            assert found == {"input_ids": ids, "attention_mask": [1] * len(ids)}
            assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi\nassistant\n"
            assert tokenizer.batch_decode([tokenizer.encode("a"), tokenizer.encode("b")]) == ["a", "b"]
            assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"

    await asyncio.to_thread(check)


def test_a_tokenizer_pads_on_either_side(url: str) -> None:
    tokenizer = ServerTokenizer(Client(url, KEY))
    tokenizer.padding_side = "left"
    rows = [{"input_ids": [1, 2, 3, 4]}, {"input_ids": [5]}]
    padded = tokenizer.pad(rows, padding="max_length", max_length=8, return_tensors="np")
    assert padded["input_ids"].tolist() == [[0, 0, 0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 0, 0, 5]]
    assert padded["attention_mask"].tolist()[0] == [0, 0, 0, 0, 1, 1, 1, 1]
    tokenizer.padding_side = "right"
    assert tokenizer.pad(rows)["input_ids"] == [[1, 2, 3, 4], [5, 0, 0, 0]]
    assert tokenizer.pad({"input_ids": [5]}, padding="max_length", max_length=2) == {
        "input_ids": [5, 0],
        "attention_mask": [1, 0],
    }
    with pytest.raises(InvalidRequest, match="'max_length' is 3"):
        tokenizer.pad(rows, padding="max_length", max_length=3)


async def test_servers_share_the_calls_that_run_now() -> None:
    placement = Placement(2, 10)
    async with placement.running("a") as first, placement.running("b") as second:
        assert {first, second} == {0, 1}
    async with placement.running("c") as third:
        pass  # a call that has ended does not count
    async with placement.running("d") as fourth, placement.running("b") as again:
        assert (fourth, again) == (third, second)


async def test_a_single_turn_is_cut_to_the_response_length_with_its_logprobs(url: str) -> None:
    async with AsyncClient(url, KEY) as client, client.session("t") as session:
        manager = AsyncLLMServerManager(config(), session)
        loop = SingleTurnAgentLoop(config(), manager, None)
        output = await loop.run([user("hi")], {**SAMPLING, "max_tokens": 12})
        (answer,) = manager.answers
    assert len(answer) == 12
    assert output.response_ids == answer[:8]
    assert output.response_logprobs == (answer.log_probs or [])[:8]
    assert (output.response_mask, output.stop_reason) == ([1] * 8, "response_length")


class Chooses(AsyncLLMServerManager):
    """Chooses the server by the request's name, as a subclass for verl does."""

    def _choose_server(self, request_id: str) -> Any:
        return self.server_handles[int(request_id)] if request_id.isdecimal() else self.config


async def test_a_subclass_chooses_the_server_of_each_call(url: str) -> None:
    async with Chooses(config(), [url, "http://127.0.0.1:1"], admin_key=KEY) as manager:
        assert len(await manager.generate("0", prompt_ids=[1, 2], sampling_params=SAMPLING)) > 0
        with pytest.raises(ServerUnreachable):
            await manager.generate("1", prompt_ids=[1, 2], sampling_params=SAMPLING)
        with pytest.raises(InvalidRequest, match=r"_choose_server of Chooses returned .* not in its server_handles"):
            await manager.generate("other", prompt_ids=[1, 2], sampling_params=SAMPLING)
        assert type(pickle.loads(pickle.dumps(manager))) is Chooses


def test_the_server_of_a_request_follows_from_its_name_with_full_determinism() -> None:
    def chosen() -> list[int]:
        manager = AsyncLLMServerManager(config(full_determinism=True), ["http://a", "http://b", "http://c"])
        return [manager.server_of(f"request {number}") for number in range(40)]

    assert chosen() == chosen() and set(chosen()) == {0, 1, 2}
