"""What ROLL's manager makes of conversations with a published template, spelled out: `{0}` context, `{1}` trained.

The first case is what ROLL makes of it, too. In the others ROLL drops, repeats or doubles tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.app import build_app
from proxy.engine.create import model_folder
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Reply, play
from proxy.rendering import Renderer, load_renderer
from proxy.settings import Settings
from proxy.types import ids_of
from tests.support import assistant, call_text, default_url, function_tool, system, tool_result, user
from tests.unit.proxy.rendering.rendering_folders import ASSETS, ENDS, MARKERS, write_folder
from tests.unit.tokengrove.roll.roll_queues import Queue
from tokengrove.client import Client
from tokengrove.roll import AgentRunner, DataProto, EpisodeResult, ProxyEnvManager, Section

Ask = Callable[..., dict[str, Any]]
START = [system("S"), user("U")]
TOOLS = [function_tool("f", {"a": {"type": "integer"}})]
SHORT = {"<|im_start|>": "[", "<|im_end|>": "]", "user\n": "u:", "assistant\n": "a:", "system\n": "s:"}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """The template of Qwen 2.5 with the vocabulary of the built-in model."""
    source = ASSETS / "chat_templates" / "qwen2_5.jinja"
    if not source.is_file():
        pytest.skip(f"no chat template at {source}")
    text, (model_type, ends) = source.read_text(encoding="utf-8"), ENDS["qwen2_5"]
    markers = [*dict.fromkeys([*MARKERS.findall(text), *ends])]
    folder = tmp_path_factory.mktemp("qwen")
    return load_renderer(Settings(), write_folder(folder, model_folder(Settings()), text, markers, ends, model_type))


def reply_of(renderer: Renderer, text: str) -> Reply:
    """The reply whose text is `text`; one that ends in `...` is cut there, without its end token."""
    end = [] if text.endswith("...") else [renderer.stop_token_ids[0]]
    return Reply(renderer.encode(text.removesuffix("...")) + ids_of(end))


def played(
    folder: Path, renderer: Renderer, talk: Callable[[Ask], Any], *replies: str, mode: str = "traj"
) -> list[str]:
    """The rows of an episode in which the agent is `talk`, which gets a function that asks the model."""

    class Runner(AgentRunner):
        def ask(self, messages: list[Any], **more: Any) -> dict[str, Any]:
            with httpx.Client() as http:
                message: dict[str, Any] = self._llm_request(http, messages, **more)["choices"][0]["message"]
            return message

        def run_job(self, seed: int) -> EpisodeResult:
            talk(self.ask)
            return EpisodeResult("Finished", 1.0)

    queue = Queue(1)
    env = {"tag": "t", "env_id": 0, "group_id": 0, "group_seed": 0, "agent_runner_cls": Runner}
    settings = Settings(database_url=default_url(folder), migrate=True)
    engine = ScriptedEngine(play([reply_of(renderer, text) for text in replies]), vocab_size=renderer.vocab_size)
    with Client(app=build_app(settings, engine=engine, renderer=renderer)) as client:
        manager = ProxyEnvManager(
            *(Section(), Section(sequence_length=2048), Section(env, config={"trajectory_mode": mode})),
            *(None, client, queue),
        )
        manager.run_rollout_loop(DataProto(meta_info={"seed": 0}))
    (rollout,) = queue.rollouts
    assert (rollout.batch["infer_logprobs"] != 0).sum() == rollout.batch["response_mask"].sum()
    return [spelled(renderer, rollout, row) for row in range(len(rollout))]


def spelled(renderer: Renderer, rollout: DataProto, row: int) -> str:
    length = int(rollout.batch["attention_mask"][row].sum())
    ids, mask = (rollout.batch[name][row, :length].tolist() for name in ("input_ids", "response_mask"))
    edges = [at for at in range(length) if at == 0 or mask[at] != mask[at - 1]]
    parts = zip(edges, [*edges[1:], length], strict=True)
    text = "".join(f"{{{int(mask[at])}}}{renderer.decode(ids[at:end])}" for at, end in parts)
    for long, short in SHORT.items():
        text = text.replace(long, short)
    return text


def twice(ask: Ask) -> None:
    ask([*START, ask(START), user("U2")])


def test_a_conversation_is_one_row_and_each_turn_a_row_of_its_own(qwen: Renderer, tmp_path: Path) -> None:
    assert played(tmp_path, qwen, twice, "A1", "A2") == ["{0}[s:S]\n[u:U]\n[a:{1}A1]{0}\n[u:U2]\n[a:{1}A2]"]
    assert played(tmp_path, qwen, twice, "A1", "A2", mode="step") == [
        "{0}[s:S]\n[u:U]\n[a:{1}A1]",
        "{0}[s:S]\n[u:U]\n[a:A1]\n[u:U2]\n[a:{1}A2]",
    ]


def test_an_answer_that_was_cut_gets_its_end_as_context(qwen: Renderer, tmp_path: Path) -> None:
    assert played(tmp_path, qwen, twice, "A1...", "A2") == ["{0}[s:S]\n[u:U]\n[a:{1}A1{0}]\n[u:U2]\n[a:{1}A2]"]


def test_a_rewritten_answer_begins_a_row_and_stays_trained(qwen: Renderer, tmp_path: Path) -> None:
    def rewrites(ask: Ask) -> None:
        ask(START)
        ask([*START, assistant("A1x"), user("U2")])

    assert played(tmp_path, qwen, rewrites, "A1", "A2") == [
        "{0}[s:S]\n[u:U]\n[a:{1}A1]",
        "{0}[s:S]\n[u:U]\n[a:A1x]\n[u:U2]\n[a:{1}A2]",
    ]


def test_agents_that_take_turns_keep_a_row_each(qwen: Renderer, tmp_path: Path) -> None:
    def take_turns(ask: Ask) -> None:
        other = [system("T"), user("V")]
        first, second = ask(START), ask(other)
        ask([*START, first, user("U2")])
        ask([*other, second, user("V2")])

    assert played(tmp_path, qwen, take_turns, "A1", "B1", "A2", "B2") == [
        "{0}[s:S]\n[u:U]\n[a:{1}A1]{0}\n[u:U2]\n[a:{1}A2]",
        "{0}[s:T]\n[u:V]\n[a:{1}B1]{0}\n[u:V2]\n[a:{1}B2]",
    ]


def test_the_best_of_two_answers_goes_on_and_both_are_trained_once(qwen: Renderer, tmp_path: Path) -> None:
    def best(ask: Ask) -> None:
        first = ask(START)
        ask(START)
        ask([*START, first, user("U2")])

    assert sorted(played(tmp_path, qwen, best, "A1", "A2", "A3")) == [
        "{0}[s:S]\n[u:U]\n[a:{1}A1]{0}\n[u:U2]\n[a:{1}A3]",
        "{0}[s:S]\n[u:U]\n[a:{1}A2]",
    ]


def test_two_tool_results_are_one_turn_of_the_user_as_the_template_has_them(qwen: Renderer, tmp_path: Path) -> None:
    calls = [call_text("f", f'{{"a": {number}}}') for number in (1, 2)]

    def call(ask: Ask) -> None:
        answer = ask(START, tools=TOOLS)
        results = [tool_result(made["id"], f"R{at}") for at, made in enumerate(answer["tool_calls"])]
        ask([*START, answer, *results], tools=TOOLS)

    results = "\n".join(f"<tool_response>\nR{at}\n</tool_response>" for at in range(2))
    (row,) = played(tmp_path, qwen, call, "\n".join(calls), "done")
    assert row.partition("[u:U]")[2] == "\n[a:{1}" + "\n".join(calls) + "]{0}\n[u:" + results + "]\n[a:{1}done]"


def test_reasoning_stands_in_later_prompts_as_the_model_saw_it(qwen: Renderer, tmp_path: Path) -> None:
    thought = "<think>r</think>A1"
    assert played(tmp_path, qwen, twice, thought, "A2", mode="step")[1] == (
        "{0}[s:S]\n[u:U]\n[a:" + thought + "]\n[u:U2]\n[a:{1}A2]"
    )
