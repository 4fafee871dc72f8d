"""verl's agent loops on a vision model: images of the dataset and of tools are in the recorded turns, exactly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.engine.scripted.scripts import Script
from proxy.rendering.renderer import Renderer
from tests.support import Server, call_text, says, serving
from tests.vision import image_file, png
from tokengrove.client import AsyncClient, Sample
from tokengrove.client.adapters import vision
from tokengrove.errors import InvalidRequest, ProxyError
from tokengrove.verl import AgentLoopBase, AgentLoopManager, AgentLoopOutput, ToolResponse, function_tool
from tokengrove.verl.tools import get_function_tool

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("torch")

ROLLOUT = {"prompt_length": 96, "response_length": 96, "multi_turn": {"format": "hermes"}}
CONFIG = {"actor_rollout_ref": {"rollout": ROLLOUT}}
LONG = {"actor_rollout_ref": {"rollout": {**ROLLOUT, "prompt_length": 512, "response_length": 256}}}
FIRST, SECOND = png(64, 48, 1), png(90, 30, 2)


def opened(data: bytes) -> Any:
    import io

    return Image.open(io.BytesIO(data)).convert("RGB")


def asked(*images: Any, text: str = "What is it?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*({"type": "image", "image": each} for each in images), part(text)]}]


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@function_tool
def look(where: str) -> ToolResponse:
    """Look somewhere.

    Args:
        where: The place.
    """
    return ToolResponse(text=f"This is {where}.", image=[opened(SECOND)])


Model = tuple[Renderer, Path]


@pytest.fixture(scope="module")
def model(vision_renderer: Renderer, vision_folder: Path) -> Model:
    return vision_renderer, vision_folder


@asynccontextmanager
async def seeing(folder: Path, model: Model, script: Script) -> AsyncIterator[tuple[Server, AsyncClient]]:
    renderer, of = model
    async with serving(folder, script, renderer, model=str(of)) as server, AsyncClient(app=server.app) as client:
        yield server, client


async def recorded(client: AsyncClient, made: Any, row: int = 0) -> Sample:
    how: Any = {"layout": "concat", "multi_modal_inputs": True, "images": "bytes"}
    [sample] = (await client.export(session_id=made.non_tensor_batch["session_id"][row], **how)).samples
    return sample


def check(made: Any, sample: Sample, row: int = 0) -> None:
    """The row of a batch has the ids, positions and tensors of what the session recorded."""
    kept = made.batch["attention_mask"][row] == 1
    assert made.batch["input_ids"][row][kept].tolist() == sample.input_ids.tolist()
    found = made.batch["position_ids"][row][:, kept]
    assert found[0].tolist() == list(range(len(sample.input_ids)))
    assert found[1:].tolist() == vision.positions(sample).tolist()
    inputs = made.non_tensor_batch["multi_modal_inputs"][row]
    for name, values in vision.arrays(sample).items():
        assert np.array_equal(inputs[name].numpy(), values)


async def test_an_answer_about_a_picture(tmp_path: Path, model: Model) -> None:
    async with seeing(tmp_path, model, says("A box.")) as (server, client):
        manager = AgentLoopManager(CONFIG, client)
        made = await manager.generate_sequences([{"raw_prompt": asked(FIRST), "agent_name": "single_turn_agent"}])
        sample = await recorded(client, made)
    [placed] = sample.images
    assert placed["digest"] == image_file(64, 48, 1).digest
    assert not sample.loss_mask[placed["start"] : placed["start"] + placed["length"]].any()
    assert server.engine.requests[0].images.placed[0].digest == placed["digest"]
    check(made, sample)


async def test_pictures_of_tools_are_shown_in_the_next_turn(tmp_path: Path, model: Model) -> None:
    script = says(call_text("look", '{"where": "left"}'), "Nothing there.")
    async with seeing(tmp_path, model, script) as (server, client):
        manager = AgentLoopManager(LONG, client, tools=[get_function_tool("look")])
        sample = {"raw_prompt": asked(opened(FIRST)), "agent_name": "tool_agent"}
        made = await manager.generate_sequences([sample])
        told = await recorded(client, made)
    assert len(told.images) == 2 and len(told.interaction_ids) == 2
    assert [len(request.images.placed) for request in server.engine.requests] == [1, 2]
    text = model[0].decode(server.engine.requests[1].input_ids)
    assert "This is left." in text
    check(made, told)


class ByHand(AgentLoopBase):
    """A loop that keeps its ids by the methods of verl 0.9, and shows a second picture as a user."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        media = await self.process_vision_info(messages)
        images = media["images"]
        self._assert_mm_supported(bool(images))
        prompt = ids = await self.ct_build_initial_tokens(messages, images=images)
        mask: list[int] = []
        for turn in range(2):
            output = await self.server_manager.generate(
                "r", prompt_ids=ids, sampling_params=sampling_params, image_data=images
            )
            merged, mask, _ = await self.ct_merge_assistant_token(ids, output.token_ids, mask)
            ids = merged.token_ids
            messages.append({"role": "assistant", "content": "A box."})
            if turn == 0:
                new = [*messages, *asked(opened(SECOND), text="And this?")]
                merged, mask, _ = await self.ct_merge_context_msg(messages, new, ids, mask)
                ids, messages, images = merged.token_ids, new, [*images, opened(SECOND)]
        return AgentLoopOutput(prompt, ids[len(prompt) :], mask, num_turns=4, multi_modal_data={"images": images})


async def test_a_loop_by_hand_continues_the_tokens_of_its_pictures(tmp_path: Path, model: Model) -> None:
    async with seeing(tmp_path, model, says("A box.", "A line.")) as (_, client):
        manager = AgentLoopManager(CONFIG, client)
        made = await manager.generate_sequences([{"raw_prompt": asked(FIRST), "agent_name": f"{__name__}:ByHand"}])
        told = await recorded(client, made)
    assert len(told.images) == 2 and len(told.interaction_ids) == 2
    check(made, told)


class Trailing(ByHand):
    """Appends a picture that the model never saw; with `changed` also an id that nobody sampled."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        ids, mask = [*output.response_ids], [*output.response_mask]
        shown = await self.ct_build_initial_tokens(asked(opened(png(28, 28, 5))))
        if kwargs["extra_info"]["changed"]:
            ids[0] += 1
        return AgentLoopOutput(
            output.prompt_ids, [*ids, *shown], [*mask, *[0] * len(shown)], multi_modal_data=output.multi_modal_data
        )


@pytest.mark.parametrize("changed", [False, True])
async def test_ids_that_no_turn_had_are_cut_off_or_refused(tmp_path: Path, model: Model, changed: bool) -> None:
    row = {"raw_prompt": asked(FIRST), "agent_name": f"{__name__}:Trailing", "extra_info": {"changed": changed}}
    async with seeing(tmp_path, model, says("A box.", "A line.")) as (_, client):
        manager = AgentLoopManager(LONG, client)
        if changed:
            with pytest.raises(Exception, match="so the tokens of its images are unknown"):
                await manager.generate_sequences([row])
            return
        made = await manager.generate_sequences([row])
        check(made, await recorded(client, made))


class Short(ByHand):
    """Returns what came before its second picture."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        first = output.response_mask.index(0)
        return AgentLoopOutput(
            output.prompt_ids,
            output.response_ids[:first],
            output.response_mask[:first],
            multi_modal_data=output.multi_modal_data,
        )


async def test_a_loop_that_returns_less_than_its_images_is_refused(tmp_path: Path, model: Model) -> None:
    async with seeing(tmp_path, model, says("A box.", "A line.")) as (_, client):
        manager = AgentLoopManager(LONG, client)
        with pytest.raises(Exception, match="recorded an image after them: return all of the trajectory"):
            await manager.generate_sequences([{"raw_prompt": asked(FIRST), "agent_name": f"{__name__}:Short"}])


class Earlier(AgentLoopBase):
    """A loop as of verl 0.7: it renders by `apply_chat_template`, and appends what that gives without the system."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        images = (await self.process_vision_info(messages)).get("images")
        ids = await self.apply_chat_template(messages, images=images)
        output = await self.server_manager.generate(
            request_id="r", prompt_ids=ids, sampling_params=sampling_params, image_data=images
        )
        return AgentLoopOutput(ids, list(output), [1] * len(output), num_turns=2, multi_modal_data={"images": images})


async def test_a_loop_of_an_earlier_verl_renders_the_same_prompt(tmp_path: Path, model: Model) -> None:
    async with seeing(tmp_path, model, says("A box.", "A box.")) as (server, client):
        manager = AgentLoopManager(CONFIG, client, max_concurrency=1)
        rows = [
            {"raw_prompt": asked(FIRST), "agent_name": name} for name in (f"{__name__}:Earlier", "single_turn_agent")
        ]
        made = await manager.generate_sequences(rows)
    first, second = server.engine.requests
    assert first.input_ids == second.input_ids and len(first.images.placed) == 1
    assert made.batch["position_ids"].shape[1] == 4


async def test_rows_without_pictures_stand_beside_rows_with_them(tmp_path: Path, model: Model) -> None:
    async with seeing(tmp_path, model, says("Hi.", "Hi.")) as (_, client):
        rows = [{"raw_prompt": [{"role": "user", "content": "Hi"}]}, {"raw_prompt": asked(FIRST)}]
        made = await AgentLoopManager(CONFIG, client, max_concurrency=1).generate_sequences(rows)
        told = [await recorded(client, made, row) for row in range(2)]
    assert made.non_tensor_batch["multi_modal_inputs"][0] == {}
    for row, sample in enumerate(told):
        check(made, sample, row)


async def test_a_prompt_with_pictures_is_never_cut(tmp_path: Path, model: Model) -> None:
    config = {"actor_rollout_ref": {"rollout": {**ROLLOUT, "prompt_length": 8}}}
    async with seeing(tmp_path, model, says()) as (_, client):
        with pytest.raises(Exception, match=r"a prompt with images has 24 tokens, but .*prompt_length is 8"):
            await AgentLoopManager(config, client).generate_sequences([{"raw_prompt": asked(FIRST)}])


async def test_a_model_of_text_refuses_pictures_by_name(tmp_path: Path) -> None:
    async with serving(tmp_path, says("Hi.")) as server, AsyncClient(app=server.app) as client:
        with pytest.raises(Exception, match="image") as raised:
            await AgentLoopManager(CONFIG, client).generate_sequences([{"raw_prompt": asked(FIRST)}])
        assert isinstance(raised.value.__cause__, ProxyError)
        with pytest.raises(InvalidRequest, match="image"):
            await client.generate([1, 2], image_data=["data:image/png;base64,AAAA"])


class Twice(ByHand):
    """Shows two pictures of one size, each in a prompt of its own, and returns what it sampled for the first."""

    kept = 0

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        pictures = [opened(png(64, 48, number)) for number in (1, 2)]
        prompt = await self.ct_build_initial_tokens(asked(pictures[0]), images=pictures[:1])
        for picture in pictures:
            output = await self.server_manager.generate(
                "r", prompt_ids=prompt, sampling_params=sampling_params, image_data=[picture]
            )
        return AgentLoopOutput(
            prompt,
            list(output.token_ids),
            [1] * len(output.token_ids),
            num_turns=2,
            multi_modal_data={"images": [self.returned(pictures)]},
        )

    def returned(self, pictures: list[Any]) -> Any:
        return pictures[self.kept]


class TwiceTheSecond(Twice):
    kept = 1


class TwiceAnother(Twice):
    def returned(self, pictures: list[Any]) -> Any:
        return opened(png(64, 48, 3))


@pytest.mark.parametrize(("loop", "row"), [("Twice", 0), ("TwiceTheSecond", 1)])
async def test_of_equal_ids_the_sample_with_the_loops_own_images_is_trained(
    tmp_path: Path, model: Model, loop: str, row: int
) -> None:
    async with seeing(tmp_path, model, says("A box.", "A box.")) as (_, client):
        manager = AgentLoopManager(CONFIG, client)
        made = await manager.generate_sequences([{"raw_prompt": asked(FIRST), "agent_name": f"{__name__}:{loop}"}])
        how: Any = {"layout": "concat", "multi_modal_inputs": True}
        samples = (await client.export(session_id=made.non_tensor_batch["session_id"][0], **how)).samples
    assert len(samples) == 2 and samples[0].input_ids.tolist() == samples[1].input_ids.tolist()
    assert samples[0].images[0]["digest"] != samples[1].images[0]["digest"]
    check(made, samples[row])


async def test_of_equal_ids_and_images_that_neither_has_nothing_is_guessed(tmp_path: Path, model: Model) -> None:
    async with seeing(tmp_path, model, says("A box.", "A box.")) as (_, client):
        manager = AgentLoopManager(CONFIG, client)
        with pytest.raises(Exception, match="2 samples with the ids of the loop and different images"):
            await manager.generate_sequences([{"raw_prompt": asked(FIRST), "agent_name": f"{__name__}:TwiceAnother"}])
