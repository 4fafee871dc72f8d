"""Each turn says which distribution its logprobs are of: in its notes, in exports of every format, and to trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Reply, play
from tests.exports import entries
from tests.support import Server, assistant, sampled, serving, user
from tokengrove.client.readers.read import READERS, read_page
from tokengrove.client.values import generated_of
from tokengrove.reasons import LogprobsOf

WORDS = [LogprobsOf.RULE, LogprobsOf.SAMPLED, LogprobsOf.MODEL]
SCRIPT = [Reply(sampled(f"answer {word}"), logprobs_of=word) for word in WORDS]


async def three_turns(server: Server) -> list[int]:
    """A conversation of three answers, one for each of `WORDS`; the numbers of their tokens."""
    messages: list[Any] = []
    for text in "abc":
        messages.append(user(text))
        reply = await server.chat(messages, temperature=0.5)
        messages.append(assistant(reply["choices"][0]["message"]["content"]))
    await server.ok("/s/rl/end_session", {"reward": 1.0})
    return [node["output_tokens"] for node in await server.tree()]


async def test_a_turn_says_it_in_its_notes_unless_it_is_the_rule(tmp_path: Path) -> None:
    async with serving(tmp_path, play(SCRIPT)) as server:
        await three_turns(server)
        assert [node["notes"] for node in await server.tree()] == [
            {},
            {"logprobs_of": "sampled"},
            {"logprobs_of": "model"},
        ]


@pytest.mark.parametrize("layout", ["individual", "concat"])
async def test_exports_of_every_format_say_it_of_each_turn_and_of_the_sample(tmp_path: Path, layout: str) -> None:
    async with serving(tmp_path, play(SCRIPT)) as server:
        lengths = await three_turns(server)
        for name in READERS:
            body = {"session_id": "s", "format": name, "layout": layout}
            export = read_page((await server.post("/export_trajectories", body)).content, name).export
            turns = [turn for sample in export.samples for turn in sample.turns]
            assert [turn["logprobs_of"] for turn in turns] == WORDS, name
            assert [turn["recomputable"] for turn in turns] == [None, "sampled", "model"], name
            assert [sample.logprobs_of for sample in export.samples] == (WORDS if layout == "individual" else ["model"])
            (warning,) = export.warnings
            counted = f"{lengths[1]} sampled, {lengths[2]} model"
            assert f"{sum(lengths[1:])} of {sum(lengths)} trained tokens" in warning and counted in warning
            assert "'train.logprobs': rule" in warning


async def test_with_train_logprobs_rule_the_others_are_context_and_counted(tmp_path: Path) -> None:
    async with serving(tmp_path, play(SCRIPT)) as server:
        lengths = await three_turns(server)
        for layout in ("individual", "concat", "tree"):
            body = {"session_id": "s", "layout": layout, "train": {"logprobs": "rule"}}
            answer = await server.ok("/export_trajectories", body)
            assert sum(sum(sample["loss_mask"]) for sample in answer["samples"]) == lengths[0]
            assert {sample["logprobs_of"] for sample in answer["samples"]} == {"rule"}
            entry = entries(answer)["s"]
            assert (entry["untrained_tokens"], entry["warnings"]) == ({"logprobs": sum(lengths[1:])}, [])
            assert [t["logprobs_of"] for sample in answer["samples"] for t in sample["turns"]] == WORDS


async def test_the_reply_to_token_ids_says_it_with_and_without_a_session(tmp_path: Path) -> None:
    async with serving(tmp_path, play([SCRIPT[1], SCRIPT[0]])) as server:
        for path, word in (("/s/v1/generate", "sampled"), ("/v1/generate", "rule")):
            reply = await server.ok(path, {"input_ids": [1, 2, 3]})
            assert reply["logprobs_of"] == generated_of(reply).logprobs_of == word


@pytest.mark.parametrize("value", ["model", True, 1])
async def test_train_logprobs_is_any_or_rule(tmp_path: Path, value: Any) -> None:
    async with serving(tmp_path, play(SCRIPT)) as server:
        response = await server.post("/export_trajectories", {"train": {"logprobs": value}})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "train.logprobs")
