"""Loops that keep their tokens with verl's helpers have the tokens that the same conversation has over the chat API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.support import assistant, function_tool, real_server, system, tool_result, user
from tokengrove.client import AsyncClient, Client, Sample
from tokengrove.errors import InvalidRequest
from tokengrove.verl import AgentLoopBase, AgentLoopManager, AgentLoopOutput, AsyncLLMServerManager
from tokengrove.verl.continuous_tokens import as_requested
from tokengrove.verl.loop_base import lists_ids

CONFIG = {"actor_rollout_ref": {"rollout": {"prompt_length": 512, "response_length": 512}}}
TOOL = function_tool("get_weather", {"city": {"type": "string"}})
QUESTION = [system("Be brief."), user("What is the weather in Paris and in Rome? Ask for each.")]
RESULTS = ["18 °C", "25 °C"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("tokens"), engine_arg=("play=agent",)) as address:
        yield address


class ByHand(AgentLoopBase):
    """Two answers, written with the helpers of verl 0.9; calls and results have no ids, as in verl's own loop."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        request_id, messages = uuid4().hex, list(kwargs["raw_prompt"])
        ids = await self.ct_build_initial_tokens(messages, tools=[TOOL])
        prompt, mask, logprobs = ids, list[int](), list[float]()
        for answer in range(2):
            if answer:
                calls = [{"function": {"name": "get_weather", "arguments": {"city": "x"}}}] * 2
                before = [*messages, assistant("", tool_calls=calls)]
                messages = [*before, *({"role": "tool", "content": result} for result in RESULTS)]
                merged, mask, logprobs = await self.ct_merge_context_msg(
                    before, messages, ids, mask, logprobs, tools=[TOOL]
                )
                ids = merged.token_ids
            output = await self.server_manager.generate(request_id, prompt_ids=ids, sampling_params=sampling_params)
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                ids, output.token_ids, mask, logprobs, assistant_logprobs=output.log_probs
            )
            assert merged.token_ids[-merged.appended_token_count :] == output
            ids = merged.token_ids
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=ids[len(prompt) :], response_mask=mask, response_logprobs=logprobs
        )


def exported(url: str, session_id: str) -> Sample:
    with Client(url) as client:
        [sample] = client.export(session_id=session_id, layout="concat").samples
    return sample


def test_a_loop_with_verls_helpers_has_the_tokens_of_the_chat_api(url: str) -> None:
    batch = AgentLoopManager(CONFIG, url).generate_sequences({"raw_prompt": [QUESTION], "agent_name": [ByHand]})
    [session_id] = batch.non_tensor_batch["session_id"]
    tokens = batch.batch["attention_mask"][0].astype(bool)
    sample = exported(url, session_id)
    assert batch.batch["input_ids"][0][tokens].tolist() == sample.input_ids.tolist()
    trained, of_response = sample.loss_mask.astype(bool), batch.batch["response_mask"][0].astype(bool)
    assert batch.batch["rollout_log_probs"][0][of_response].tolist() == sample.logprobs[trained].tolist()
    assert not batch.batch["rollout_log_probs"][0][~of_response].any()
    chat = _over_chat(url)
    assert sample.input_ids.tolist() == chat.input_ids.tolist()
    assert sample.loss_mask.tolist() == chat.loss_mask.tolist()
    assert {0, 1} == set(batch.batch["response_mask"][0].tolist())


def _over_chat(url: str) -> Sample:
    with Client(url) as client, client.session("chat") as session:
        messages = [*QUESTION]
        for _ in range(2):
            body = {"model": "m", "messages": messages, "tools": [TOOL]}
            headers = {"authorization": f"Bearer {session.api_key}"}
            reply = httpx.post(f"{session.base_url}/chat/completions", json=body, headers=headers).json()
            messages = [*messages, reply["choices"][0]["message"]]
            calls = messages[-1].get("tool_calls") or ()
            messages += [tool_result(call["id"], text) for call, text in zip(calls, RESULTS, strict=False)]
    return exported(url, session.session_id)


def test_calls_and_results_without_ids_are_numbered_and_ids_are_kept() -> None:
    call = {"function": {"name": "f", "arguments": {"a": "ß"}}}
    named = {"id": "own", "type": "function", "function": {"name": "g", "arguments": "{bad"}}
    made = as_requested([user("q"), assistant("", tool_calls=[call, named]), *[{"role": "tool", "content": "r"}] * 3])
    first, second = made[1]["tool_calls"]
    assert json.loads(first["function"]["arguments"]) == {"a": "ß"} and second == named
    assert [message["tool_call_id"] for message in made[2:4]] == [first["id"], "own"]
    assert len({message["tool_call_id"] for message in made[2:]}) == 3
    assert call == {"function": {"name": "f", "arguments": {"a": "ß"}}}  # the caller's messages are not changed


@pytest.mark.parametrize("updated", [[user("p"), assistant("a"), user("r")], [user("q")]])
async def test_messages_may_only_be_appended(updated: list[dict[str, Any]]) -> None:
    loop = ByHand(CONFIG, None, None)
    with pytest.raises(InvalidRequest, match="updated_messages"):
        await loop.ct_merge_context_msg([user("q"), assistant("a")], updated, [1], [1])


async def test_what_is_appended_obeys_the_options_of_the_template(url: str) -> None:
    options = {"data": {"apply_chat_template_kwargs": {"enable_thinking": False}}}
    async with AsyncClient(url) as client, client.session("thinking") as session:
        appended = []
        for config in (CONFIG, {**CONFIG, **options}):
            loop = ByHand(config, AsyncLLMServerManager(config, session))
            prompt = await loop.ct_build_initial_tokens(QUESTION)
            answered = [*QUESTION, assistant("a")]
            merged, _, _ = await loop.ct_merge_context_msg(answered, [*answered, user("r")], [*prompt, 5], [1])
            appended.append(await session.detokenize(merged.token_ids[len(prompt) + 1 :]))
    assert appended[1] == appended[0] + "<think>\n\n</think>\n\n"


async def test_logprobs_are_given_for_all_ids_or_for_none() -> None:
    loop = ByHand(CONFIG, None, None)
    result, mask, logprobs = await loop.ct_merge_assistant_token([1], [2, 3], [])
    assert (result.token_ids, mask, logprobs) == ([1, 2, 3], [1, 1], None)
    for response, answer in (([], [-0.5]), ([], None), (None, [-0.5, -0.5])):
        with pytest.raises(InvalidRequest, match="assistant_logprobs"):
            await loop.ct_merge_assistant_token([1], [2, 3], [], response, answer)
    with pytest.raises(InvalidRequest, match="0 parts for 1 images"):
        await loop.ct_build_initial_tokens([user("q")], images=["an image"])


def test_a_tokenizer_that_returns_a_dict_by_default_returns_a_list_to_loops() -> None:
    class Five:
        padding_side = "right"

        def apply_chat_template(self, conversation: Any, tokenize: bool = True, return_dict: bool = True) -> Any:
            return {"input_ids": [1]} if return_dict else [1]

    given = Five()
    taken = lists_ids(given)
    taken.padding_side = "left"
    assert taken.apply_chat_template([]) == [1] and isinstance(taken, Five)
    assert taken.apply_chat_template([], return_dict=True) == {"input_ids": [1]} == given.apply_chat_template([])
    assert given.padding_side == "right"
    assert lists_ids(None) is None
