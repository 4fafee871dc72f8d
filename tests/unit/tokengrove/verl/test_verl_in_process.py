"""Agent loops on an application of this process: the same batches, and engines that stop when a loop is cancelled."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from proxy.turns import turns
from proxy.types import ids_of
from tests.support import call_text, sampled, says, serving, tiny_renderer, tool_result, until, user
from tokengrove.client import AsyncClient
from tokengrove.errors import InvalidRequest, UnsupportedParameter
from tokengrove.verl import AgentLoopBase, AgentLoopFailed, AgentLoopManager, AgentLoopOutput, AsyncLLMServerManager

CONFIG = {"actor_rollout_ref": {"rollout": {"prompt_length": 64, "response_length": 64}}}
QUESTION = [user("What is the weather?")]


class Todays(AgentLoopBase):
    """A loop that keeps its ids by the methods of verl 0.9."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        media = await self.process_multi_modal_info(messages)
        prompt = ids = await self.ct_build_initial_tokens(messages, images=media.get("images"))
        mask: list[int] = []
        logprobs: list[float] | None = []
        for answer in range(2):
            output = await self.server_manager.generate(
                "r", prompt_ids=ids, sampling_params=sampling_params, image_data=media.get("images")
            )
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                ids, output.token_ids, mask, logprobs, assistant_logprobs=output.log_probs
            )
            ids = merged.token_ids
            messages.append({"role": "assistant", "content": "an answer"})
            if answer == 0:
                new = [*messages, tool_result("call_1", "sunny")]
                merged, mask, logprobs = await self.ct_merge_context_msg(messages, new, ids, mask, logprobs)
                ids, messages = merged.token_ids, new
        return AgentLoopOutput(prompt, ids[len(prompt) :], mask, response_logprobs=logprobs, num_turns=4)


async def test_a_loop_of_todays_form_keeps_exact_tokens(tmp_path: Path) -> None:
    async with serving(tmp_path, says("look", "It is sunny.")) as server, AsyncClient(app=server.app) as client:
        manager = AgentLoopManager(CONFIG, client)
        made = await manager.generate_sequences([{"raw_prompt": QUESTION, "agent_name": f"{__name__}:Todays"}])
        [sample] = (await client.export(session_id=made.non_tensor_batch["session_id"][0])).samples
    assert made.batch["input_ids"][made.batch["attention_mask"] == 1].tolist() == sample.input_ids.tolist()
    length = int(made.batch["attention_mask"][:, 64:].sum())
    assert made.batch["response_mask"][0][:length].tolist() == sample.loss_mask[-length:].tolist()
    assert made.batch["rollout_log_probs"][0][:length].tolist() == sample.logprobs[-length:].tolist()
    assert server.prompts()[1] == sample.input_ids[: len(server.prompts()[1])].tolist()
    text = tiny_renderer().decode(ids_of(sample.input_ids.tolist()))
    assert "look<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny" in text


class PrintedTools(AgentLoopBase):
    """A tool loop as the documentation prints one: what all loops share is prepared once, the tokenizer too."""

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        if cls._class_initialized:
            return
        cls._class_initialized = True
        cls.shared = tokenizer  # type: ignore[attr-defined]
        cls.parser = cls.get_tool_parser(config.actor_rollout_ref.rollout.multi_turn.format)  # type: ignore[attr-defined]
        cls.system_prompt = tokenizer.apply_chat_template([{}], add_generation_prompt=False, tokenize=True)  # type: ignore[attr-defined]

    async def run(self, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> AgentLoopOutput:
        prompt = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        )
        ids, mask = list(prompt), []
        while True:
            response = await self.server_manager.generate(
                request_id="r", prompt_ids=ids, sampling_params=sampling_params
            )
            ids += response
            mask += [1] * len(response)
            calls = await self.parser.extract_tool_calls(response)  # type: ignore[attr-defined]
            if not calls:
                return AgentLoopOutput(prompt, ids[len(prompt) :], mask, num_turns=4)
            results = [{"role": "tool", "content": f"{call.name}: sunny"} for call in calls]
            added = await self.loop.run_in_executor(
                None,
                lambda: self.shared.apply_chat_template(results, add_generation_prompt=True, tokenize=True),  # type: ignore[attr-defined] # noqa: B023
            )
            added = added[len(self.system_prompt) :]  # type: ignore[attr-defined]
            ids += added
            mask += [0] * len(added)


async def test_a_tool_loop_as_the_documentation_prints_it_appends_what_a_turn_would(tmp_path: Path) -> None:
    script = says(*[call_text("weather", "{}"), "It is sunny."] * 4)
    async with serving(tmp_path, script) as server, AsyncClient(app=server.app) as client:
        manager = AgentLoopManager(CONFIG, client, max_concurrency=1)
        sample = {"raw_prompt": QUESTION, "agent_name": f"{__name__}:PrintedTools"}
        texts = set()
        for _ in range(2):
            made = await manager.generate_sequences([sample, sample])
            for row in range(2):
                [exported] = (await client.export(session_id=made.non_tensor_batch["session_id"][row])).samples
                tokens = made.batch["input_ids"][row][made.batch["attention_mask"][row] == 1]
                assert tokens.tolist() == exported.input_ids.tolist()
                texts.add(tiny_renderer().decode(ids_of(tokens.tolist())))
    [text] = texts
    assert "<|im_end|>\n<|im_start|>user\n<tool_response>\nweather: sunny\n</tool_response><|im_end|>" in text


async def test_logprobs_that_do_not_fit_and_media_are_refused(tmp_path: Path) -> None:
    loop = Todays(CONFIG, None, None)
    with pytest.raises(InvalidRequest, match="'assistant_logprobs' has 0 values for 1"):
        await loop.ct_merge_assistant_token([1], [2], [], [])
    with pytest.raises(InvalidRequest, match="'response_logprobs'"):
        await loop.ct_merge_assistant_token([1], [2], [], None, [-0.5])
    with pytest.raises(InvalidRequest, match="0 parts for 1 images"):
        await loop.ct_build_initial_tokens(QUESTION, images=["an image"])
    with pytest.raises(UnsupportedParameter, match="videos"):
        loop.build_sglang_video_payload(["a video"], {})


async def test_the_engine_stops_when_a_batch_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "GRACE_S", 0.01)
    script = play([Reply(sampled("one two"), fault=Fault.HANG, fault_after=1)] * 2)
    async with serving(tmp_path, script) as server, AsyncClient(app=server.app) as client:
        running = asyncio.create_task(
            AgentLoopManager(CONFIG, client).generate_sequences([{"raw_prompt": QUESTION}] * 2)
        )
        await until(lambda: len(server.engine.running) == 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: not server.engine.running)
        assert {each["outcome"] for each in await client.sessions()} == {"Failed"}


async def test_the_engine_stops_when_a_call_without_a_session_is_cancelled(tmp_path: Path) -> None:
    script = play([Reply(sampled("one two"), fault=Fault.HANG, fault_after=1)])
    async with serving(tmp_path, script) as server, AsyncClient(app=server.app) as client:
        manager = AsyncLLMServerManager(CONFIG, client)
        running = asyncio.create_task(manager.generate("r", prompt_ids=[1, 2], sampling_params={}))
        await until(lambda: bool(server.engine.running))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: not server.engine.running)


async def test_an_engine_that_fails_fails_its_sample(tmp_path: Path) -> None:
    script = play([Reply(sampled("one two"), fault=Fault.ERROR, fault_after=1)] * 9)
    async with serving(tmp_path, script) as server, AsyncClient(app=server.app) as client:
        with pytest.raises(AgentLoopFailed, match=r"sample 0 .*EngineFailed"):
            await AgentLoopManager(CONFIG, client).generate_sequences([{"raw_prompt": QUESTION}])
        assert [each["outcome"] for each in await client.sessions()] == ["Failed"]


async def test_sessions_go_to_the_server_with_the_fewest(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        clients = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            server = await stack.enter_async_context(serving(tmp_path / name, says(*["hello"] * 3)))
            clients.append(await stack.enter_async_context(AsyncClient(app=server.app)))
        await AgentLoopManager(CONFIG, clients).generate_sequences([{"raw_prompt": QUESTION}] * 6)
        assert [len(await client.sessions()) for client in clients] == [3, 3]


async def test_a_server_without_capacity_is_given_it_by_the_start(tmp_path: Path) -> None:
    async with serving(tmp_path, says("hello"), capacity_control=True) as server, AsyncClient(app=server.app) as client:
        made = await AgentLoopManager(CONFIG, client).generate_sequences([{"raw_prompt": QUESTION}])
    assert made.batch["response_mask"].sum() > 0


async def test_no_task_or_connection_is_left(tmp_path: Path) -> None:
    async with serving(tmp_path, says("hello", "hello")) as server, AsyncClient(app=server.app) as client:
        manager = AgentLoopManager(CONFIG, client)
        await manager.generate_sequences([{"raw_prompt": QUESTION}])
        before = asyncio.all_tasks()
        await manager.generate_sequences([{"raw_prompt": QUESTION}])
        await until(lambda: asyncio.all_tasks() <= before)
