"""Agent loops are found by name, in a file, and by their class; both forms of loops are called as they are written."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tokengrove.errors import InvalidRequest
from tokengrove.verl import AgentLoopBase, AgentLoopOutput, DictConfigWrap, register
from tokengrove.verl.loop_base import run_loop
from tokengrove.verl.registry import _agent_loop_registry, register_file, resolve
from tokengrove.verl.settings import trainer_config

ROLLOUT = {"prompt_length": 4, "response_length": 8}
CONFIG = trainer_config({"actor_rollout_ref": {"rollout": ROLLOUT}})
SAMPLE = {"raw_prompt": [{"role": "user", "content": "hi"}], "extra_info": {"answer": "7"}, "index": 3}


class Tokenizer:
    def apply_chat_template(self, messages: list[Any], **options: Any) -> list[int]:
        return [len(each["content"]) for each in messages] * options.get("repeat", 1)


class Printed(AgentLoopBase):
    """As the documentation prints a loop."""

    def __init__(self, config: Any, server_manager: Any, tokenizer: Any) -> None:
        super().__init__(config, server_manager, tokenizer)
        self.response_length = config.actor_rollout_ref.rollout.response_length

    async def run(self, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> AgentLoopOutput:
        prompt_ids = await self.loop.run_in_executor(None, lambda: self.tokenizer.apply_chat_template(messages))
        return AgentLoopOutput(prompt_ids, [self.response_length], [1], metrics={})  # type: ignore[arg-type]


class Today(AgentLoopBase):
    """As a loop for verl 0.9 is written."""

    def __init__(self, *args: Any, greeting: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.greeting = greeting

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.build_prompt(kwargs["raw_prompt"])
        extra = {"seen": sorted(kwargs), "greeting": self.greeting}
        return AgentLoopOutput(prompt_ids, [int(kwargs["extra_info"]["answer"])], [1], extra_fields=extra)


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(_agent_loop_registry):
        monkeypatch.setitem(_agent_loop_registry, name, _agent_loop_registry[name])


async def test_the_printed_form_gets_messages_and_sampling_params() -> None:
    loop = Printed(CONFIG, None, Tokenizer())
    output = await run_loop(loop, {}, SAMPLE)
    assert (output.prompt_ids, output.response_ids) == ([2], [8])


async def test_todays_form_gets_the_columns_of_the_sample() -> None:
    loop = Today(trainer_config=DictConfigWrap(CONFIG), server_manager=None, tokenizer=Tokenizer(), greeting="hey")
    output = await run_loop(loop, {}, SAMPLE)
    assert (output.prompt_ids, output.response_ids) == ([2], [7])
    assert output.extra_fields == {"seen": ["extra_info", "index", "raw_prompt"], "greeting": "hey"}


async def test_a_prompt_that_is_too_long_keeps_its_end_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    config = {"actor_rollout_ref": {"rollout": ROLLOUT}, "data": {"apply_chat_template_kwargs": {"repeat": 3}}}
    loop = Today(config, None, Tokenizer())
    with caplog.at_level(logging.WARNING):
        ids = await loop.build_prompt([{"content": "a"}, {"content": "bb"}])
    assert ids == [1, 2, 1, 2]
    assert "6 tokens" in caplog.text


async def test_init_class_is_called_with_what_it_takes_and_each_class_has_its_own_flag() -> None:
    class Prepared(Printed):
        @classmethod
        def init_class(cls, config: Any, tokenizer: Any) -> None:
            if not cls._class_initialized:
                cls._class_initialized = True
                cls.length = config.actor_rollout_ref.rollout.prompt_length  # type: ignore[attr-defined]

    class Derived(Prepared):
        pass

    assert Prepared(CONFIG, None, Tokenizer()).length == 4  # type: ignore[attr-defined]
    assert Prepared._class_initialized
    assert not Derived._class_initialized


async def test_an_argument_that_nothing_takes_is_refused() -> None:
    with pytest.raises(TypeError, match="takes no 'colour'"):
        Today(CONFIG, None, Tokenizer(), colour="red")


async def test_a_loop_that_returns_something_else_is_refused() -> None:
    class Wrong(Printed):
        async def run(self, messages: Any, sampling_params: Any) -> Any:
            return [1, 2]

    with pytest.raises(InvalidRequest, match=r"Wrong\.run returned 'list'"):
        await run_loop(Wrong(CONFIG, None, Tokenizer()), {}, SAMPLE)


def test_a_registered_name_finds_its_class_and_a_class_path_too() -> None:
    register("mine")(Today)
    assert resolve("mine") == (Today, {})
    assert resolve(f"{__name__}:Printed") == (Printed, {})
    assert resolve(f"{__name__}.Printed") == (Printed, {})
    assert resolve(Printed) == (Printed, {})


def test_an_unknown_name_lists_the_known_ones() -> None:
    register("mine")(Today)
    with pytest.raises(InvalidRequest, match=r"'yours' is not registered; known are .*mine"):
        resolve("yours")


def test_a_file_registers_loops_with_their_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loops.yaml"
    path.write_text(f"- name: mine\n  _target_: {__name__}.Today\n  greeting: ${{oc.env:GREETING}}\n")
    monkeypatch.setenv("GREETING", "hey")
    register_file(path)
    assert resolve("mine") == (Today, {"greeting": "hey"})


@pytest.mark.parametrize("text", ["mine: 3", "- name: mine", "- {name: 3, _target_: a.b}", "- [", "- just text"])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "loops.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRequest):
        register_file(path)


@pytest.mark.parametrize("argument", ["_partial_: true", "tools: [{_target_: a.B}]", "helper: {_target_: a.B}"])
def test_what_only_hydra_could_do_is_refused(tmp_path: Path, argument: str) -> None:
    path = tmp_path / "loops.yaml"
    path.write_text(f"- name: mine\n  _target_: a.B\n  {argument}\n")
    with pytest.raises(InvalidRequest, match=r"'_\w+_' of 'mine' needs hydra"):
        register_file(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"none\.yaml"):
        register_file(tmp_path / "none.yaml")
