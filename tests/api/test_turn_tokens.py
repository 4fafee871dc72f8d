"""GET /rl/sessions/{session}/interactions/{turn}?include=tokens: every token of a turn, as exports have it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from tests.support import Server, assistant, sampled, says, serving, system, user

HEAD = [system("Be brief."), user("one")]
EXPORTS: list[dict[str, Any]] = [
    {},
    {"layout": "individual"},
    {"layout": "tree"},
    {"drift": "mask"},
    {"train": {"turns": "last"}},
    {"mask_unfinished": True},
    {"filter": {"min_version": 1}},
    {"filter": {"min_version": 1}, "stale": "mask"},
    {"layout": "padded", "prompt_length": 64, "response_length": 64},
    {"layout": "padded", "prompt_length": 8, "response_length": 5, "on_too_long": "truncate", "keep": "tail"},
    {"layout": "padded", "prompt_length": 8, "response_length": 5, "on_too_long": "drop"},
]


async def tokens(server: Server, turn: str | int, options: dict[str, Any] | None = None, session: str = "s") -> Any:
    """Return the tokens of a turn under the options of an export."""
    query = {name: value if isinstance(value, str) else json.dumps(value) for name, value in (options or {}).items()}
    params = {"include": "tokens", **query}
    response = await server.http.get(f"/rl/sessions/{session}/interactions/{turn}", params=params)
    assert response.status_code == 200, response.text
    return response.json()["tokens"]


async def forked(server: Server) -> None:
    """Two turns, and two that go on from the first in other ways; the last turn has weights of version 1."""
    first = await server.answer(HEAD)
    await server.answer([*HEAD, first, user("two")])
    await server.answer([*HEAD, first, user("three ⏎ 🙂")])
    await server.ok("/engine/update_weights", {"path": "/weights/1", "version": 1})
    await server.answer([*HEAD, assistant("edited"), user("four")])


def spread(shown: Any, kind: str, name: str, context: Any) -> list[Any]:
    """A value for each token out of runs; `context` where there is none."""
    found = [context] * len(shown["ids"])
    for run in shown[kind]:
        found[run["start"] : run["end"]] = [run[name]] * (run["end"] - run["start"])
    return found


@pytest.fixture
async def session(tmp_path: Path) -> Any:
    """A server with a session that forked, and that still runs."""
    script = says("an answer", "more", "other 🙂", "fourth")
    async with serving(tmp_path, script) as server:
        await forked(server)
        yield server


async def test_ids_and_texts_are_those_of_the_prompt_and_the_output(session: Server) -> None:
    for number, prompt in enumerate(session.prompts()):
        shown = await tokens(session, number)
        output = sampled(["an answer", "more", "other 🙂", "fourth"][number]).tolist()
        assert shown["ids"] == prompt + output
        assert len(shown["texts"]) == len(shown["ids"])
        assert "".join(shown["texts"]) == session.app.state.renderer.decode(shown["ids"])
        assert all(shown["texts"][index] == "" for index in shown["continues"])
        assert not any("�" in text for text in shown["texts"])


def samples(shown: Any) -> list[str | None]:
    """The id of the sample that trains each token."""
    return [each and each["interaction_id"] for each in spread(shown, "states", "sample", None)]


def pieces(sample: Any, layout: str, shown: Any) -> list[tuple[int, int, int]]:
    """Where the tokens of a sample stand in those of its last turn, as (start there, start here, length)."""
    if layout != "padded":
        return [(0, 0, len(sample["input_ids"]))]
    first = next(part["start"] for part in shown["parts"] if part["kind"] == "output")
    prompt, response = sample["prompt_lengths"][0], sample["response_lengths"][0]
    width = len(sample["prompts"])
    return [(first - prompt, width - prompt, prompt), (len(shown["ids"]) - response, width, response)]


def told(shown: Any, trained_in: str) -> dict[str, list[Any]]:
    """The columns of the sample that ends with this turn, out of the tokens of a turn."""
    trained = [name == trained_in for name in samples(shown)]
    versions = spread(shown, "versions", "version", -1)
    return {
        "input_ids": shown["ids"],
        "loss_mask": [int(on) for on in trained],
        "logprobs": [value if on else 0 for value, on in zip(shown["logprobs"], trained, strict=True)],
        "versions": [value if on else -1 for value, on in zip(versions, trained, strict=True)],
    }


@pytest.mark.parametrize("options", EXPORTS, ids=json.dumps)
async def test_tokens_are_those_of_the_exported_samples(session: Server, options: dict[str, Any]) -> None:
    answer = await session.ok("/trajectories/export", {"session_id": "s", **options})
    assert answer["samples"] or options.get("on_too_long") == "drop"
    for sample in answer["samples"]:
        last, layout = sample["interaction_id"], options.get("layout", "concat")
        if layout == "tree":
            continue
        shown = await tokens(session, last, options)
        columns = told(shown, last)
        assert sum(columns["loss_mask"]) == sum(sample["loss_mask"])
        for there, here, length in pieces(sample, layout, shown):
            for name, values in columns.items():
                assert values[there : there + length] == sample[name][here : here + length]


async def test_tokens_are_those_of_the_nodes_of_an_exported_tree(session: Server) -> None:
    (sample,) = await session.export(layout="tree")
    assert len(sample["interaction_ids"]) == 4
    for at, name in enumerate(sample["interaction_ids"]):
        first, end = sample["node_offsets"][at : at + 2]
        for column, values in told(await tokens(session, name, {"layout": "tree"}), sample["interaction_id"]).items():
            assert values[first - end :] == sample[column][first:end]


@pytest.mark.parametrize("options", EXPORTS, ids=json.dumps)
async def test_states_add_up_to_the_counts_of_the_export(session: Server, options: dict[str, Any]) -> None:
    (entry,) = (await session.ok("/trajectories/export", {"session_id": "s", **options}))["sessions"]
    counts: Counter[str] = Counter()
    for node in await session.tree():
        shown = await tokens(session, node["id"], options)
        counts.update(spread(shown, "states", "state", None)[-node["output_tokens"] :])
        told = shown["export"]
    names = ("sampled_tokens", "trained_tokens", "untrained_tokens", "warnings")
    assert {name: told[name] for name in names} == {name: entry[name] for name in names}
    trained = counts.pop("trained", 0)
    assert (trained, counts) == (entry["trained_tokens"], entry["untrained_tokens"])


async def test_parts_say_which_turn_brought_what(session: Server) -> None:
    nodes = await session.tree()
    shown = await tokens(session, 1)
    first, second = nodes[0], nodes[1]
    ends = [first["prompt_tokens"], first["prompt_tokens"] + first["output_tokens"], second["prompt_tokens"]]
    assert [(part["interaction_id"], part["turn"], part["kind"], part["end"]) for part in shown["parts"]] == [
        (first["id"], 0, "prompt", ends[0]),
        (first["id"], 0, "output", ends[1]),
        (second["id"], 1, "prompt", ends[2]),
        (second["id"], 1, "output", len(shown["ids"])),
    ]
    assert (len(shown["sections"]), shown["lost"]) == (1, [])


async def test_each_state_that_occurs_is_explained(session: Server) -> None:
    shown = await tokens(session, 1, {"train": {"turns": "last"}})
    assert shown["meanings"].keys() == {"context", "train", "trained"}
    assert all(shown["meanings"].values())


async def test_special_tokens_are_named(session: Server) -> None:
    shown = await tokens(session, 0)
    texts = {text for number, text in zip(shown["ids"], shown["texts"], strict=True) if number in shown["special"]}
    assert texts == {"<|im_start|>", "<|im_end|>"}


async def test_a_turn_that_failed_shows_what_was_sampled(tmp_path: Path) -> None:
    script = play([Reply(sampled("an answer")), Reply(sampled("cut off", end=False), fault=Fault.ERROR, fault_after=1)])
    async with serving(tmp_path, script) as server:
        first = await server.answer(HEAD)
        failed = await server.post("/s/v1/chat/completions", {"model": "m", "messages": [*HEAD, first, user("two")]})
        assert failed.status_code >= 500
        node = next(node for node in await server.tree() if node["status"] == "failed")
        shown = await tokens(server, node["id"])
        assert [run["state"] for run in shown["states"]][:3] == ["context", "trained", "context"]
        assert shown["parts"][-1]["turn"] is None
        assert shown["states"][-1]["state"] == "failed"
        assert len(shown["logprobs"]) == len(shown["ids"]) == node["prompt_tokens"] + node["output_tokens"]
        assert node["output_tokens"] > 0


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"include": "tokens", "layout": "flat"}, "layout"),
        ({"include": "tokens", "layout": "padded"}, "prompt_length"),
        ({"include": "tokens", "train": "{"}, "train"),
        ({"include": "tokens", "train": "[]"}, "train"),
        ({"include": "tokens", "filter": '{"group_id": "g"}'}, "filter.group_id"),
        ({"include": "tokens", "format": "npz"}, "format"),
        ({"layout": "concat"}, "layout"),
        ({"include": "ids", "drift": "mask"}, "drift"),
    ],
)
async def test_a_wrong_option_is_named(session: Server, query: dict[str, str], param: str) -> None:
    response = await session.http.get("/rl/sessions/s/interactions/0", params=query)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_the_parts_are_those_of_the_drift_that_is_asked_for(session: Server) -> None:
    for drift in ("fork", "mask"):
        shown = await tokens(session, 3, {"drift": drift})
        assert shown["export"]["drift"] == drift
    for layout in ("concat", "individual"):
        exported = await session.ok("/trajectories/export", {"session_id": "s", "layout": layout})
        shown = await tokens(session, 3, {"layout": layout})
        assert shown["export"]["samples"] == len(exported["samples"]) > 1
