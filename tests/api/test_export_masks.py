"""Forced calls and JSON answers are context by default, in every format and claim, and every summary says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.export_formats.create_encoder import encoder
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.types import Interaction, Logprobs, SessionRecord
from tests.exports import entries
from tests.interactions import interaction
from tests.support import Server, assistant, call_text, function_tool, says, serving, user
from tests.wide import CROSSED
from tokengrove.client import Export, operations
from tokengrove.client.readers.read import READERS, read_page
from tokengrove.options.export import ExportFormat, Layout, Padding, TrainSelection

TOOLS = [function_tool("add", {"a": {"type": "integer"}})]
CALL = call_text("add", '{"a": 1}')


async def forced(server: Server) -> tuple[int, int]:
    """A free answer, a forced call and a JSON answer; the numbers of tokens sampled freely and under a grammar."""
    messages = [user("q")]
    schema = {"type": "json_object"}
    for more in ({"tool_choice": "none"}, {"tool_choice": "required"}, {"tools": [], "response_format": schema}):
        await server.chat([*messages, user(str(more))], **{"tools": TOOLS, **more})
    tree = await server.tree()
    counts = [node["output_tokens"] for node in tree]
    await server.ok("/s/rl/end_session", {"reward": 1.0})
    return counts[0], sum(counts[1:])


async def exported(server: Server, name: str, **options: Any) -> Export:
    response = await server.post("/export_trajectories", {"session_id": "s", "format": name, **options})
    assert response.status_code == 200, response.text
    return read_page(response.content, name).export


@pytest.mark.parametrize("style", [{"layout": "individual"}, {"layout": "concat"}, {"style": "individual"}])
async def test_answers_under_a_grammar_are_context_in_every_format(tmp_path: Path, style: dict[str, Any]) -> None:
    async with serving(tmp_path, says("free", CALL, '{"b": 2}')) as server:
        free, under_grammar = await forced(server)
        for name in READERS:
            export = await exported(server, name, **style)
            reasons = [sample.recomputable for sample in export.samples]
            assert reasons == [turn["recomputable"] for sample in export.samples for turn in sample.turns]
            assert reasons == [None, "grammar", "grammar"]
            assert [int(sample.loss_mask.sum()) for sample in export.samples] == [free, 0, 0], name
            assert export.untrained_tokens == {"grammar": under_grammar}
            (warning,) = export.warnings
            assert f"{under_grammar} grammar" in warning
            asked = await exported(server, name, **style, train={"constrained": True})
            assert sum(int(sample.loss_mask.sum()) for sample in asked.samples) == free + under_grammar
            assert (asked.untrained_tokens, asked.warnings) == ({}, [])


async def test_a_claim_masks_and_warns_as_an_export_does(tmp_path: Path) -> None:
    async with serving(tmp_path, says("free", CALL, '{"b": 2}')) as server:
        free, under_grammar = await forced(server)
        body = {"export": {"format": "npz"}}
        claim = operations.claim(None, {"export": {"format": "npz"}})
        assert next(claim).body == body
        content = (await server.post("/trajectories/claim", body)).content
        with pytest.warns(UserWarning, match=f"session s: {under_grammar} of {free + under_grammar} sampled tokens"):
            try:
                claim.send(content)
            except StopIteration as end:
                export = end.value.export
        assert sum(int(sample.loss_mask.sum()) for sample in export.samples) == free


async def test_a_session_without_a_grammar_does_not_warn(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        reply = await server.chat([user("q")])
        await server.chat([user("q"), assistant(reply["choices"][0]["message"]["content"]), user("r")])
        entry = entries(await server.ok("/export_trajectories", {"session_id": "s"}))["s"]
    assert entry["sampled_tokens"] == entry["trained_tokens"] > 0
    assert (entry["untrained_tokens"], entry["warnings"]) == ({}, [])


def with_unmasked() -> list[Interaction]:
    """A free answer, then a forced call whose logprobs without the mask are known."""
    nodes = [
        interaction("free", suffix=[1, 2], output=[3, 4], seq=0),
        interaction("call", parent="free", prefix=4, suffix=[5], output=[6, 7, 8], seq=1),
    ]
    nodes[1].grammar, nodes[1].unmasked_logprobs = True, Logprobs("f", [-4.0, -8.0, -2.0])
    return nodes


@CROSSED
@pytest.mark.parametrize("layout", [Layout.CONCAT, Layout.INDIVIDUAL, Layout.TREE, Layout.PADDED])
@pytest.mark.parametrize("name", READERS)
def test_logprobs_without_the_mask_stand_beside_the_masked_ones(name: str, layout: Layout) -> None:
    if name == "areal" and layout in (Layout.TREE, Layout.PADDED):
        return
    padding = Padding(4, 8) if layout is Layout.PADDED else None
    options = LayoutOptions(layout=layout, padding=padding, train=TrainSelection(constrained=True))
    encoding = encoder(ExportFormat(name), options)
    content = b""
    for session, nodes in (("with", with_unmasked()), ("without", with_unmasked()[:1])):
        laid = lay_out(SessionRecord(session), nodes, options)
        content += b"".join(encoding.add(laid.rows, {"session_id": session, "untrained_tokens": {}, "warnings": []}))
    content += b"".join(encoding.finish({"cursor": None}))
    encoding.close()
    export = read_page(content, name).export
    (joined,) = [sample for sample in export.samples if sample.interaction_id == "call"]
    unmasked = joined.extra["unmasked_logprobs"]
    assert unmasked.dtype == np.float32
    assert unmasked[joined.loss_mask == 1].tolist() == [
        *([] if layout is Layout.INDIVIDUAL else [-0.5, -0.5]),
        *(-4.0, -8.0, -2.0),
    ]
    assert not unmasked[joined.loss_mask == 0].any()
    for other in export.samples:
        if other.interaction_id == "free" and "unmasked_logprobs" in other.extra:  # a padded archive has all rows
            assert other.extra["unmasked_logprobs"].tolist() == other.logprobs.tolist()
            assert (layout, name) in ((Layout.PADDED, "npz"), (Layout.PADDED, "safetensors"))


def test_without_training_them_their_logprobs_are_not_exported() -> None:
    (row,) = lay_out(SessionRecord("s"), with_unmasked(), LayoutOptions()).rows
    assert "unmasked_logprobs" not in row.columns()


@pytest.mark.parametrize("value", [1, "yes", []])
async def test_constrained_is_true_or_false(tmp_path: Path, value: Any) -> None:
    async with serving(tmp_path, says("one")) as server:
        response = await server.post("/export_trajectories", {"train": {"constrained": value}})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "train.constrained")
