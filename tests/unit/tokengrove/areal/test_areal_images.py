"""AReaL's workflow on a vision model: each interaction has the images of its prompt, as tensors and as they came."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from proxy.engine.scripted.scripts import Script
from proxy.rendering.renderer import Renderer
from tests.support import says, serving
from tests.vision import image_url, png, text_part
from tokengrove.areal import OpenAIProxyWorkflow
from tokengrove.areal.tensor_rows import concat_padded_tensors
from tokengrove.client import AsyncClient
from tokengrove.kinds.areal_workflow import WorkflowAgent
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, Server, Task, play

torch = pytest.importorskip("torch")
pytest.importorskip("PIL")

FIRST, SECOND = png(64, 48, 1), png(90, 120, 2)


class Looking:
    """Asks about a picture, and then about another one; `blind` asks about none."""

    async def run(self, data: dict[str, Any], *, base_url: str, http_client: Any, **_: Any) -> float:
        contents = ["Hi"] if data.get("blind") else [[image_url(FIRST), text_part("What?")], [image_url(SECOND)]]
        messages: list[dict[str, Any]] = []
        for content in contents:
            messages.append({"role": "user", "content": content})
            body = {"model": "m", "messages": messages}
            answer = await http_client.post(f"{base_url}/v1/chat/completions", json=body)
            messages.append(answer.json()["choices"][0]["message"])
        return 1.0


async def found(folder: Path, model: tuple[Renderer, Path], script: Script, style: str, *rows: dict[str, Any]) -> Any:
    renderer, of = model
    async with serving(folder, script, renderer, model=str(of)) as server, AsyncClient(app=server.app) as client:
        workflow = OpenAIProxyWorkflow(agent=Looking(), client=client, export_style=style)
        return [await workflow.arun_episode(None, row) for row in rows]


@pytest.fixture(scope="module")
def model(vision_renderer: Renderer, vision_folder: Path) -> tuple[Renderer, Path]:
    return vision_renderer, vision_folder


async def test_each_turn_has_the_images_of_its_own_prompt(tmp_path: Path, model: Any) -> None:
    [turns] = await found(tmp_path, model, says("A box.", "A line."), "individual", {})
    first, second = turns.values()
    assert first.model_response.input_images == [base64.b64encode(FIRST).decode()]
    assert second.model_response.input_images == [base64.b64encode(data).decode() for data in (FIRST, SECOND)]
    rows = [turn.to_tensor_dict() for turn in (first, second)]
    grids = [row["multi_modal_input"][0]["image_grid_thw"] for row in rows]
    assert [len(grid) for grid in grids] == [1, 2] and torch.equal(grids[0], grids[1][:1])
    pad = model[0].images.token
    for row, grid in zip(rows, grids, strict=True):
        assert row["mm_token_type_ids"].tolist() == (row["input_ids"] == pad).long().tolist()
        [inputs] = row["multi_modal_input"]
        assert inputs["pixel_values"].shape[0] == int(grid.prod(dim=1).sum())
        assert row["mm_token_type_ids"].sum() == int(grid.prod(dim=1).sum()) // 4
        assert not (row["mm_token_type_ids"] * row["loss_mask"]).any()


async def test_rows_with_images_join_rows_without(tmp_path: Path, model: Any) -> None:
    script = says("A box.", "A line.", "Hello.")
    seen, blind = await found(tmp_path, model, script, "concat", {}, {"blind": True})
    rows = [turn.to_tensor_dict() for turns in (seen, blind) for turn in turns.values()]
    batch = concat_padded_tensors(rows)
    assert [len(inputs) for inputs in batch["multi_modal_input"]] == [2, 0]
    assert batch["mm_token_type_ids"].shape == batch["input_ids"].shape
    assert batch["loss_mask"][0].sum() == sum(len(turn.model_response.output_tokens) for turn in seen.values()) + len(
        model[0].encode("A box.<|im_end|>")
    )


async def test_the_images_of_a_workflows_request_are_those_of_the_turn(tmp_path: Path, model: Any) -> None:
    class Vision:
        """Samples from expanded tokens and base64, as AReaL's VisionRLVRWorkflow does."""

        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
            gconfig = SimpleNamespace(max_new_tokens=4, temperature=1.0, top_k=10**8, stop=None, greedy=False)
            images = [base64.b64encode(FIRST).decode()]
            asked = SimpleNamespace(input_ids=data["ids"], image_data=images, gconfig=gconfig, rid="r")
            response = await engine.agenerate(asked)
            assert response.input_images == images
            return {"input_ids": [response.input_tokens + response.output_tokens], "rewards": [0.5]}

    renderer, folder = model
    async with (
        serving(tmp_path, says("A box."), renderer, model=str(folder)) as server,
        AsyncClient(app=server.app) as client,
    ):
        ids = await client.tokenize([{"role": "user", "content": [image_url(FIRST), text_part("What?")]}])
        agent = AgentSpec("path", "unused", arguments={})
        task = Task("look", {"ids": ids})
        plan = EpisodePlan(
            task=task, sample=0, attempt=0, server=Server("http://unused"), agent=agent, session_id="episode"
        )
        result = await play(plan, WorkflowAgent(Vision(), "vision"), client)
        [sample] = (await client.export(session_id="episode", multi_modal_inputs=True)).samples
    assert (result.failure, result.reward) == (None, 0.5)
    assert sample.input_ids[: len(ids)].tolist() == ids and len(sample.images) == 1
    assert np.array_equal(sample.multi_modal_inputs["image_grid_thw"], [[1, 4, 4]])  # type: ignore[index]
