"""Images in the trainers' own code: what it makes of our batches gives the logprobs that the engine had."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from proxy.engine.tiny.vision import VisionKind, build_tiny_vision_model
from proxy.vision.load_processor import load_processor
from tests.conformance.packages import package
from tests.conformance.trainers.played import ask
from tests.e2e.processes import server_process
from tests.recomputed import MOST, difference, logprobs, model_of
from tokengrove.client import AsyncClient, Client, Export
from tokengrove.client.adapters import areal, huggingface, trl, trl_rollout, verl
from tokengrove.client.image_urls import ImageUrls
from tokengrove.errors import InvalidRequest
from tokengrove.verl import AsyncLLMServerManager

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

GREATER = 0.01
"""What a lost image changes at least in some logprob."""
SIZES = [(64, 48), (90, 120)]


class Played(SimpleNamespace):
    """`folder`: the model's. `export`: a session with two pictures, in its first and last turn, and one of texts."""

    folder: Path
    url: str
    export: Export


@pytest.fixture(scope="module", params=list(VisionKind))
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp(str(request.param))
    build_tiny_vision_model(folder, request.param)
    flags = ["--model", str(folder), "--engine", "transformers", "--engine-arg", "device=cpu"]
    with server_process(tmp_path_factory.mktemp("seeing"), *flags) as process:
        url = process.url.rstrip("/")
        with Client(url) as client:
            shown = [[picture(*SIZES[0]), text("What is it?")], "And?", [picture(*SIZES[1])]]
            for name, told in (("seen", shown), ("blind", ["Hi", "And?"])):
                with client.session("t", session_id=name, group_id="g", sampling={"max_tokens": 6}) as session:
                    talk(session.base_url, told)
                    session.set_reward(float(name == "seen"))
            how: Any = {"layout": "concat", "multi_modal_inputs": True, "images": "bytes", "advantages": "grpo"}
            yield Played(folder=folder, url=url, export=client.export(session_ids=["seen", "blind"], **how))


def talk(base_url: str, contents: list[Any]) -> None:
    messages: list[dict[str, Any]] = []
    for content in contents:
        messages.append({"role": "user", "content": content})
        messages.append(ask(base_url, messages))


def drawn(width: int, height: int) -> Any:
    values = np.arange(width * height * 3).reshape(height, width, 3) % 251
    return package("PIL.Image").fromarray(values.astype(np.uint8))


def picture(width: int, height: int) -> dict[str, Any]:
    written = io.BytesIO()
    drawn(width, height).save(written, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def verls_worker(folder: Path) -> Any:
    """What verl's AgentLoopWorker needs to make the tensors of an output, of its own processor."""
    from transformers import AutoConfig

    processor = load_processor(folder)
    processor.config = AutoConfig.from_pretrained(folder)
    processor.chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    # verl gives a text without placeholders, which transformers takes for an error since release 5.
    processor.validate_inputs = lambda *_, **__: None
    kind = type(model_of(folder).model)
    for name in ("get_rope_index", "get_vision_position_ids"):
        if hasattr(kind, name):
            setattr(processor, name, getattr(kind, name).__get__(processor))
    return SimpleNamespace(
        processor=processor, tokenizer=processor.tokenizer, _get_mm_processor_kwargs=lambda audio=None: {}
    )


def test_verls_worker_makes_the_same_tensors_and_positions(played: Played) -> None:
    torch: Any = package("torch")
    worker: Any = package("verl.experimental.agent_loop.agent_loop").AgentLoopWorker
    made = verl.padded(played.export.samples, images=played.export.images)
    for row, sample in enumerate(played.export.samples):
        ids = torch.tensor(sample.input_ids.astype(np.int64))[None]
        images = made.non_tensor_batch["multi_modal_data"][row].get("image")
        output = SimpleNamespace(multi_modal_data={"images": images}, mm_processor_kwargs=None)
        own = verls_worker(played.folder)
        inputs = worker._compute_multi_modal_inputs(own, output, ids)
        positions = worker._compute_position_ids(own, ids, torch.ones_like(ids), inputs, {})
        kept = made.batch["attention_mask"][row] == 1
        assert made.batch["position_ids"][row][:, kept].tolist() == positions[0].tolist()
        ours = made.non_tensor_batch["multi_modal_inputs"][row]
        for name in ("pixel_values", "image_grid_thw", "images_seqlens") if images else ():
            assert ours[name].dtype == inputs[name].dtype and torch.equal(ours[name], inputs[name]), name


class Pictures:
    """verl's class of a dataset, as far as loops ask it: for the images of messages."""

    @classmethod
    async def process_vision_info(cls, messages: list[dict[str, Any]], **_: Any) -> tuple[Any, None]:
        parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
        return [part["image"] for part in parts if part["type"] == "image"] or None, None


async def test_verls_own_loop_shows_a_picture_to_our_server(played: Played) -> None:
    """It renders the prompt with its own processor; the server places the image in these ids."""
    loops: Any = package("verl.experimental.agent_loop.single_turn_agent_loop")
    base: Any = package("verl.experimental.agent_loop.agent_loop")
    lengths = {"prompt_length": 256, "response_length": 8, "full_determinism": False}
    settings = {"actor_rollout_ref": {"rollout": lengths}, "data": {"tool_config_path": None}}
    config = package("omegaconf").OmegaConf.create(settings)
    own = verls_worker(played.folder)
    messages = [{"role": "user", "content": [{"type": "image", "image": drawn(*SIZES[0])}, text("What is it?")]}]
    async with AsyncClient(played.url) as client, client.session("verl") as session:
        loop = loops.SingleTurnAgentLoop(
            trainer_config=base.DictConfigWrap(config),
            server_manager=AsyncLLMServerManager(None, session),
            tokenizer=own.tokenizer,
            processor=own.processor,
            dataset_cls=Pictures,
            data_config=base.DictConfigWrap(config.data),
            hf_model_type=own.processor.config.model_type,
        )
        output = await loop.run({"max_tokens": 8, "logprobs": True}, raw_prompt=messages)
        ids = await session.tokenize(ImageUrls().messages(messages))
        [sample] = (await client.export(session_id=session.session_id, multi_modal_inputs=True)).samples
    assert list(output.prompt_ids) == ids
    assert sample.input_ids.tolist() == [*output.prompt_ids, *output.response_ids]
    assert sample.multi_modal_inputs["image_grid_thw"].shape == (1, 3)  # type: ignore[index]
    assert [image.size for image in output.multi_modal_data["images"]] == SIZES[:1]


def test_verls_actor_computes_the_logprobs_of_our_data_proto(played: Played) -> None:
    torch: Any = package("torch")
    extract = package("verl.utils.model").extract_multi_modal_inputs
    padding: Any = package("verl.workers.utils.padding")
    proto = verl.padded(played.export.samples).to_data_proto()
    batch = proto.batch
    images = extract(list(proto.non_tensor_batch["multi_modal_inputs"]))
    images.pop("images_seqlens")
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    inputs["position_ids"] = batch["position_ids"].transpose(0, 1)
    width = batch["prompts"].shape[1]
    expected = torch.nn.functional.pad(batch["rollout_log_probs"], (width, 0))
    mask = torch.nn.functional.pad(batch["response_mask"], (width, 0))
    assert difference(logprobs(played.folder, **inputs, **images), expected, mask) < MOST
    assert difference(logprobs(played.folder, **inputs), expected, mask) > GREATER
    jagged = padding.left_right_2_no_padding(proto.to_tensordict())
    for row, sample in zip(jagged["position_ids"].unbind(), played.export.samples, strict=True):
        assert row.shape == (4, len(sample.input_ids))


def test_areals_engine_computes_the_logprobs_of_our_rows(played: Played) -> None:
    torch: Any = package("torch")
    data: Any = package("areal.utils.data")
    rows = [entry["tensor_dict"] for entry in areal.interactions(played.export.samples, torch=True).values()]
    batch = data.concat_padded_tensors(rows)
    grids = torch.cat([each["image_grid_thw"] for each in batch["multi_modal_input"] if "image_grid_thw" in each])
    positions = model_of(played.folder).model.compute_3d_position_ids(
        input_ids=batch["input_ids"],
        image_grid_thw=grids,
        video_grid_thw=None,
        attention_mask=batch["attention_mask"],
        mm_token_type_ids=batch["mm_token_type_ids"],
        inputs_embeds=None,
        past_key_values=None,
    )
    forward = {  # as AReaL's engine does, which cannot be imported without peft
        name: torch.cat([each[name] for each in batch["multi_modal_input"] if name in each])
        for name in ("pixel_values", "image_grid_thw")
    }
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "position_ids": positions}
    found = logprobs(played.folder, **inputs, **forward)
    assert difference(found, batch["logprobs"], batch["loss_mask"]) < MOST
    assert difference(logprobs(played.folder, **inputs), batch["logprobs"], batch["loss_mask"]) > GREATER


def test_areals_own_proxy_client_class_gets_the_same_rows(played: Played) -> None:
    """Objects of AReaL's class, filled as AReaL fills them, keep the images beside the tensors."""
    kinds: Any = package("areal.experimental.openai.types")
    filled = areal.fill(played.export.samples, kinds.InteractionWithTokenLogpReward)
    row = filled[played.export.samples[0].interaction_id].to_tensor_dict()
    assert len(row["multi_modal_input"][0]["image_grid_thw"]) == 2
    checked = package("areal.infra.workflow_executor").check_trajectory_format
    assert checked({name: value for name, value in row.items() if name != "rewards"} | {"rewards": row["rewards"]})


def test_trls_trainer_computes_the_logprobs_of_our_batch(played: Played, tmp_path: Path) -> None:
    torch, library = package("torch"), package("trl")
    rows = package("datasets").Dataset.from_dict({"prompt": [[{"role": "user", "content": "Hi"}]] * 2})
    config = library.GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=2, num_generations=2
    )
    processor = load_processor(played.folder)
    trainer = library.GRPOTrainer(
        model_of(played.folder),
        args=config,
        reward_funcs=trl_rollout.session_reward,
        train_dataset=rows,
        processing_class=processor,
    )
    batch = trl_rollout.training_batch(played.export.samples, pad_token_id=processor.tokenizer.pad_token_id)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    names = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
    media = {name: batch[name] for name in names}
    mask = batch["completion_mask"] * batch["tool_mask"]
    with torch.no_grad():
        found, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attention, batch["completion_ids"].shape[1], **media
        )
        loss = trainer._compute_loss(trainer.model, batch)
    assert difference(found, batch["sampling_per_token_logps"], mask) < MOST
    assert torch.isfinite(loss)


def test_trls_asynchronous_worker_is_given_no_sample_with_images(played: Played) -> None:
    package("trl.experimental.async_grpo")
    with pytest.raises(InvalidRequest, match="RolloutSample cannot hold"):
        trl.rollout_samples(played.export.samples)


def test_a_dataset_has_the_pictures_as_datasets_decodes_them(played: Played, tmp_path: Path) -> None:
    datasets: Any = package("datasets")
    made = huggingface.to_dataset(played.export.samples, images=played.export.images)
    made.save_to_disk(str(tmp_path / "kept"))
    seen, blind = datasets.load_from_disk(str(tmp_path / "kept"))
    assert [image.size for image in seen["images"]] == SIZES and blind["images"] == []
    assert np.array_equal(np.asarray(seen["images"][0]), np.asarray(drawn(*SIZES[0])))
    sample = played.export.samples[0]
    assert np.allclose(seen["pixel_values"], sample.multi_modal_inputs["pixel_values"])  # type: ignore[index]
    assert np.array_equal(seen["mrope_position_ids"], sample.mrope_position_ids)
    assert blind["pixel_values"] is None and seen["image_spans"].count("digest") == 2
