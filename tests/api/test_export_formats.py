"""Every format carries bit for bit what JSON carries, and the libraries that trainers use can read it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.export_formats import arrow
from tests.api.test_export import always, chain, export
from tests.exports import areal_tensor, as_float32, entries, read
from tests.support import Server, sampled, says, serving, user

FORMATS = ("json", "jsonl", "npz", "safetensors", "arrow", "parquet")
PADDED = {"layout": "padded", "prompt_length": 64, "response_length": 128}


async def answer(server: Server, **body: Any) -> Any:
    response = await server.post("/export_trajectories", body)
    assert response.status_code == 200, response.text
    return response


async def forest(server: Server) -> None:
    """Three sessions: one with a fork and all kinds of rewards, one without turns, and a plain one."""
    for name in ("s", "empty", "t"):
        await server.ok("/rl/start_session", {"task_id": "task", "session_id": name, "group_id": "g"})
    first = await server.chat([user("a")])
    messages = [user("a"), first["choices"][0]["message"]]
    for text in ("b", "c"):
        await server.chat([*messages, user(text)])
    rewards = [0.5] * len(sampled("ok"))
    await server.ok("/s/rl/set_reward", {"interaction_id": first["id"], "token_rewards": rewards})
    await server.ok("/s/rl/set_reward", {"reward": 1.25})
    await server.ok("/s/rl/set_reward", {"reward": 0.1, "name": "style"})
    await chain(server, "t")
    await server.ok("/t/rl/end_session", {"reward": -3, "outcome": "Finished", "metrics": {"score": 0.5}})


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "individual"},
        {"layout": "concat", "advantages": "grpo", "step_advantages": "leave_one_out", "unrewarded": "zero"},
        {"layout": "tree", "advantages": "leave_one_out", "unrewarded": "zero"},
        PADDED,
    ],
    ids=lambda options: options["layout"],
)
async def test_every_format_carries_what_json_carries(tmp_path: Path, options: dict[str, Any]) -> None:
    async with serving(tmp_path, always()) as server:
        await forest(server)
        plain = read("json", (await answer(server, **options)).content)
        assert len(plain["samples"]) == {"individual": 5, "concat": 3, "tree": 2, "padded": 3}[options["layout"]]
        assert set(entries(plain)) == {"s", "empty", "t"}
        for name in FORMATS:
            found = read(name, (await answer(server, format=name, **options)).content)
            assert (found["sessions"], found["cursor"]) == (plain["sessions"], None), name
            assert len(found["samples"]) == len(plain["samples"])
            for ours, theirs in zip(plain["samples"], found["samples"], strict=True):
                if options["layout"] == "padded":  # an array of fixed width is 0 in a row that has none
                    ours = {"token_rewards": [0.0] * 192, **ours}
                    theirs = {"token_rewards": [0.0] * 192, **theirs}
                assert theirs == ours, name


async def test_libraries_see_the_documented_dtypes(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    async with serving(tmp_path, always()) as server:
        await forest(server)
        schema = pa.ipc.open_stream((await answer(server, format="arrow", **PADDED)).content).schema
        for name in ("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids"):
            assert schema.field(name).type == pa.list_(pa.int64())
        schema = pa.ipc.open_stream((await answer(server, format="arrow", layout="concat")).content).schema
        for name in ("input_ids", "loss_mask", "versions", "turn_ids"):
            assert schema.field(name).type == pa.list_(pa.int32())
        assert schema.field("attention_mask").type == pa.list_(pa.bool_())
        assert schema.field("logprobs").type == schema.field("rewards").type == pa.list_(pa.float32())


@pytest.mark.parametrize("name", FORMATS)
async def test_the_cursor_header_continues_pages_in_every_format(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path, always()) as server:
        for number in range(5):
            await chain(server, f"s{number}", turns=1)
        seen, cursor, pages = [], None, 0
        while pages < 5:
            response = await answer(server, format=name, limit=2, cursor=cursor)
            page = read(name, response.content)
            seen += [sample["session_id"] for sample in page["samples"]]
            pages, cursor = pages + 1, page["cursor"]
            assert response.headers.get("x-tokengrove-cursor") == cursor
            if cursor is None:
                break
        assert (seen, pages) == ([f"s{number}" for number in range(5)], 3)


@pytest.mark.parametrize("name", FORMATS)
async def test_an_empty_export_is_valid_in_every_format(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path, always()) as server:
        for options in ({}, {"layout": "tree"}, PADDED):
            found = read(name, (await answer(server, format=name, **options)).content)
            assert found == {"samples": [], "sessions": [], "cursor": None}


async def test_areals_client_gets_what_it_deserialises(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await forest(server)
        for style in ("individual", "concat"):
            found = await export(server, session_id="s", layout=style, discount=0.9, reward_scope="path")
            plain = [as_float32(sample) for sample in found["samples"]]
            body = (await answer(server, session_id="s", style=style, discount=0.9)).json()
            assert body == (await answer(server, session_id="s", layout=style, discount=0.9, format="areal")).json()
            assert list(body["interactions"]) == [sample["interaction_id"] for sample in plain]
            for sample in plain:
                found = body["interactions"][sample["interaction_id"]]
                assert found["interaction_id"] == sample["interaction_id"]
                assert found["reward"] == sample["rewards"][0]
                tensors = {name: areal_tensor(value) for name, value in found["tensor_dict"].items()}
                for name in ("input_ids", "loss_mask", "versions", "logprobs", "attention_mask"):
                    assert tensors[name].tolist() == [sample[name]], name
                assert tensors["rewards"].tolist() == sample["rewards"]
                assert ("token_rewards" in tensors) == ("token_rewards" in sample)
                if "token_rewards" in sample:
                    assert tensors["token_rewards"].tolist() == [sample["token_rewards"]]
                assert {tensors[name].dtype.name for name in ("input_ids", "loss_mask", "versions")} == {"int64"}
            assert entries(body)["s"]["complete"] is True
        assert (await answer(server, session_id="empty", style="individual")).json()["interactions"] == {}


async def test_messages_and_text_are_included_on_request(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        first = await server.answer([user("a")])
        await server.answer([user("a"), first, user("b")])
        (sample,) = await server.export(include=["messages", "text"])
        messages = [message for turn in sample["turns"] for message in turn["messages"]]
        said = [(message["role"], message["content"]) for message in messages]
        assert said == [("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")]
        assert [turn["text"] for turn in sample["turns"]] == ["one<|im_end|>", "two<|im_end|>"]
        assert sample["text"].count("<|im_start|>") == 4 and sample["text"].endswith("two<|im_end|>")
        second = (await server.export(layout="individual", include=["messages"]))[1]
        assert [message["content"] for message in second["turns"][0]["messages"]] == ["a", "one", "b", "two"]
        (plain,) = await server.export()
        exact = as_float32(sample)
        assert "text" not in plain and not {"messages", "text"} & set(plain["turns"][0])
        for name in ("jsonl", "npz", "arrow", "parquet"):
            page = read(
                name, (await answer(server, format=name, layout="concat", include=["messages", "text"])).content
            )
            assert page["samples"] == [exact], name


async def test_areals_interactions_have_their_parent_and_the_included_conversation(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        first = await server.answer([user("a")])
        await server.answer([user("a"), first, user("b")])
        options: dict[str, Any] = {"format": "areal", "include": ["messages"]}
        single = (await answer(server, layout="individual", **options)).json()["interactions"]
        root, child = single
        assert [single[name]["parent"] for name in (root, child)] == [None, root]
        asked = [message["content"] for message in single[child]["messages"]]
        answered = [message["content"] for message in single[child]["output_message_list"]]
        assert (asked, answered) == (["a", "one", "b"], ["two"])
        joined = (await answer(server, layout="concat", **options)).json()["interactions"]
        assert joined[child]["messages"] == single[child]["messages"] and joined[child]["parent"] == root
        plain = (await answer(server, format="areal", layout="concat")).json()["interactions"]
        assert "messages" not in plain[child]


async def test_the_first_turn_of_a_sample_has_the_tools_of_its_conversation(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
        first = await server.answer([user("a")], tools=[tool])
        await server.answer([user("a"), first, user("b")], tools=[tool])
        (sample,) = await server.export(include=["messages"])
        assert [turn.get("tools") for turn in sample["turns"]] == [[tool], None]
        second = (await server.export(layout="individual", include=["messages"]))[1]
        assert second["turns"][0]["tools"] == [tool]


async def test_a_turn_has_its_parent_and_times_and_a_session_its_metadata(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        await server.ok("/rl/start_session", {"task_id": "t", "session_id": "s", "metadata": {"env_id": 3}})
        asked = [user("a")]
        answered = (await server.chat(asked, "s"))["choices"][0]["message"]
        await server.chat([*asked, answered, user("b")], "s")
        body = await server.ok("/export_trajectories", {"session_id": "s", "layout": "concat"})
        first, second = body["samples"][0]["turns"]
        assert 0 < first["created_at"] <= first["completed_at"] <= second["created_at"] <= second["completed_at"]
        assert [first["parent_id"], second["parent_id"]] == [None, first["interaction_id"]]
        assert entries(body)["s"]["metadata"] == {"env_id": 3}


def test_a_server_without_pyarrow_names_the_extra_to_install() -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from tokengrove.errors import UnsupportedParameter\n"
        "from proxy.export_formats.create_encoder import ExportFormat, encoder\n"
        "from proxy.trajectory.layout_options import LayoutOptions\n"
        "encoder(ExportFormat.NPZ, LayoutOptions()).close()\n"
        "for name in (ExportFormat.ARROW, ExportFormat.PARQUET):\n"
        "    try: encoder(name, LayoutOptions())\n"
        "    except UnsupportedParameter as error: print(error.param, error.message)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.count("format") >= 2 and run.stdout.count("tokengrove[export]") == 2


async def test_a_truncated_answer_is_not_readable_as_a_whole(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await chain(server)
        lines = (await answer(server, format="jsonl")).content.splitlines()
        assert [set(json.loads(line)) for line in lines[-1:]] == [{"sessions", "cursor"}]


async def test_a_parquet_file_of_many_row_groups_has_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(arrow, "_GROUP_BYTES", 1)
    async with serving(tmp_path, always()) as server:
        await forest(server)
        plain = read("json", (await answer(server)).content)
        body = (await answer(server, format="parquet")).content
    names = [sample["interaction_id"] for sample in plain["samples"]]
    assert [sample["interaction_id"] for sample in read("parquet", body)["samples"]] == names
    assert parquet.ParquetFile(io.BytesIO(body)).num_row_groups == len(names)  # the session without turns has none
