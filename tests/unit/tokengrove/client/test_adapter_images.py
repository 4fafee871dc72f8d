"""Samples with images reach every trainer with the tensors that its model takes, whole and in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.samples import chain, sample
from tests.vision import png
from tokengrove.client import Sample
from tokengrove.client.adapters import areal, roll, trl, trl_rollout, verl, vision
from tokengrove.client.images import ImageBytes
from tokengrove.errors import InvalidRequest

torch = pytest.importorskip("torch")

PAD = 9
FIRST = {"digest": "a" * 64, "start": 1, "length": 4, "width": 56, "height": 56}
SECOND = {"digest": "b" * 64, "start": 8, "length": 2, "width": 56, "height": 28}
GRIDS = [[1, 4, 4], [1, 2, 4]]
ROWS = np.arange(24, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)


def table() -> dict[str, ImageBytes]:
    """Both images, with what the processor made of them."""
    made = {}
    for image, rows, grid in ((FIRST, ROWS[:16], GRIDS[0]), (SECOND, ROWS[16:], GRIDS[1])):
        inputs = {"auto": {"pixel_values": rows, "image_grid_thw": np.array([grid])}}
        size = (image["width"], image["height"])
        made[str(image["digest"])] = ImageBytes(str(image["digest"]), "image/png", *size, png(*size), inputs)
    return made


def seen(**more: Any) -> Sample:
    """Two turns, an image in the prompt and one in the tool's answer; 12 tokens, of which 6, 7 and 11 are sampled."""
    positions = np.stack([np.arange(12), np.arange(12) * 2, np.arange(12) * 3])
    more = {"images": [FIRST, SECOND], "mrope_position_ids": positions, **more}
    turns = [([1, *[PAD] * 4, 2], [3, 4]), ([PAD, PAD, 5], [6])]
    return replace(chain(turns, rewards=[0.5, 1.0], group="g", advantages=[2.0], **more), image_table=table())


def blind() -> Sample:
    """A sample of the same model, without images."""
    positions = np.broadcast_to(np.arange(3), (3, 3))
    return sample([1, 2], [3], session="t", group="g", advantages=[-2.0], mrope_position_ids=positions)


def test_verls_actors_get_tensors_by_row_and_positions_of_four_rows() -> None:
    made = verl.padded([seen(), blind()])
    first, second = made.non_tensor_batch["multi_modal_inputs"]
    assert second == {}
    assert first["pixel_values"].shape == (24, 3) and first["pixel_values"].dtype == torch.float32
    assert first["image_grid_thw"].tolist() == GRIDS
    assert first["images_seqlens"].tolist() == [16, 8]
    found = made.batch["position_ids"]
    assert found.shape == (2, 4, 12) and found.dtype == np.int64
    assert found[0].tolist() == [[each * step for each in range(12)] for step in (1, 1, 2, 3)]
    text = made.batch["attention_mask"][1] == 1
    assert found[1][:, text].tolist() == [[0, 1, 2]] * 4
    assert not found[1][:, ~text].any()


def test_verls_response_begins_with_an_answer_and_never_trains_an_image() -> None:
    batch = verl.padded([seen()]).batch
    assert batch["prompts"].tolist() == [[1, PAD, PAD, PAD, PAD, 2]]
    assert batch["responses"].tolist() == [[3, 4, PAD, PAD, 5, 6]]
    assert batch["response_mask"].tolist() == [[1, 1, 0, 0, 0, 1]]


def test_verls_batch_without_images_is_what_it_was() -> None:
    made = verl.padded([sample([1, 2], [3])], images=None)
    assert "multi_modal_inputs" not in made.non_tensor_batch and "multi_modal_data" not in made.non_tensor_batch
    assert made.batch["position_ids"].shape == (1, 3)


def test_verls_pictures_are_in_the_order_of_their_tokens() -> None:
    first, second = verl.padded([seen(), blind()], images=table()).non_tensor_batch["multi_modal_data"]
    assert second == {} and [image.size for image in first["image"]] == [(56, 56), (56, 28)]
    with pytest.raises(InvalidRequest, match="images='bytes'"):
        verl.padded([seen()], images={})


def test_a_picture_in_low_detail_is_given_as_small_as_the_model_saw_it() -> None:
    digest = "e" * 64
    images = {digest: ImageBytes(digest, "image/png", 1024, 640, png(1024, 640))}
    placed = [{"digest": digest, "start": at, "length": 1, "width": 1024, "height": 640} for at in (0, 1)]
    shown = replace(blind(), images=(placed[0], {**placed[1], "detail": "low"}))
    assert [picture.size for picture in vision.pictures(shown, images)] == [(1024, 640), (512, 320)]


@pytest.mark.parametrize(("lengths", "fits"), [((6, 4), True), ((6, 3), False), ((5, 6), True), ((4, 6), False)])
def test_truncation_never_cuts_an_image(lengths: tuple[int, int], fits: bool) -> None:
    how: Any = {"prompt_length": lengths[0], "response_length": lengths[1]}
    if not fits:
        with pytest.raises(InvalidRequest, match="cut off an image"):
            verl.padded([seen()], on_too_long="truncate", **how)
        assert len(verl.padded([seen(), blind()], on_too_long="drop", **how).batch["prompts"]) == 1
        return
    found = verl.padded([seen()], on_too_long="truncate", **how).batch["position_ids"][0]
    assert found.tolist() == [[each * step for each in range(sum(lengths))] for step in (1, 1, 2, 3)]


def test_areals_rows_have_the_columns_of_its_vision_workflow() -> None:
    rows = areal.interactions([seen(), blind()], torch=True)
    told, other = (entry["tensor_dict"] for entry in rows.values())
    assert told.keys() == other.keys()
    assert told["mm_token_type_ids"].tolist() == [[0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0]]
    assert told["mm_token_type_ids"].dtype == torch.int64
    [inputs] = told["multi_modal_input"]
    assert inputs["image_grid_thw"].tolist() == GRIDS and inputs["pixel_values"].shape == (24, 3)
    assert other["multi_modal_input"] == [{}] and not other["mm_token_type_ids"].any()
    plain = areal.interactions([sample([1], [2])])["s-0"]["tensor_dict"]
    assert "multi_modal_input" not in plain and "mm_token_type_ids" not in plain


def test_rolls_fields_have_positions_of_three_rows_and_tensors_by_row() -> None:
    made = roll.trajectories([seen(), blind()], sequence_length=16, pad_token_id=7)
    found = made.batch["position_ids"]
    assert found.shape == (2, 3, 16)
    assert found[0, :, :12].tolist() == [[each * step for each in range(12)] for step in (1, 2, 3)]
    assert found[1].tolist() == [[0, 1, 2, *[0] * 13]] * 3
    first, second = made.non_tensor_batch["multi_modal_inputs"]
    assert first.keys() == {"pixel_values", "image_grid_thw"} and second == {}
    assert not made.batch["response_mask"][0, 1:5].any()
    assert roll.trajectories([sample([1, 2], [3])]).batch["position_ids"].shape == (1, 3)


def test_trls_training_batch_packs_the_images_of_all_rows() -> None:
    batch = trl_rollout.training_batch([blind(), seen()])
    assert batch["num_images"] == [0, 2] and batch["pixel_values"].shape == (24, 3)
    assert batch["image_grid_thw"].tolist() == GRIDS
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    assert batch["mm_token_type_ids"].tolist() == (ids == PAD).long().tolist()
    assert batch["advantages"].tolist() == [-2.0, 2.0]
    assert (batch["completion_mask"] * batch["tool_mask"]).tolist() == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 1]]
    assert batch["num_items_in_batch"] == 4
    plain = trl_rollout.training_batch([sample([1], [2])], advantages=[1.0])
    assert "pixel_values" not in plain and "num_images" not in plain
    with pytest.raises(InvalidRequest, match="advantages='grpo'"):
        trl_rollout.training_batch([sample([1], [2])])


def test_a_rollout_function_gives_no_images_that_came_after_the_prompt() -> None:
    only_prompt = seen(images=[FIRST])
    assert trl_rollout.completions([only_prompt])["prompt_ids"] == [[1, PAD, PAD, PAD, PAD, 2]]
    with pytest.raises(InvalidRequest, match="after its prompt"):
        trl_rollout.completions([seen()])


def test_trls_asynchronous_trainer_is_given_no_tokens_that_stand_for_nothing() -> None:
    pytest.importorskip("trl")
    with pytest.raises(InvalidRequest, match="RolloutSample cannot hold"):
        trl.rollout_samples([seen()])


@pytest.mark.parametrize("make", [verl.padded, areal.interactions, roll.trajectories, trl_rollout.training_batch])
def test_images_without_their_tensors_are_refused_by_name(make: Any) -> None:
    with pytest.raises(InvalidRequest, match="multi_modal_inputs=True"):
        make([replace(seen(), image_table={})])


def test_the_arrays_of_the_images_before_a_turn_are_those_of_its_prompt() -> None:
    told = seen()
    assert vision.arrays_before(told, 6)["image_grid_thw"].tolist() == GRIDS[:1]
    assert vision.arrays_before(told, 12)["pixel_values"].tolist() == ROWS.tolist()
    assert vision.arrays_before(told, 1) == {}


def test_a_model_that_only_counts_tokens_keeps_positions_of_one_row() -> None:
    told = seen()
    del told.extra["mrope_position_ids"]  # type: ignore[attr-defined]
    made = verl.padded([told])
    assert (
        made.batch["position_ids"].shape == (1, 12) and "pixel_values" in made.non_tensor_batch["multi_modal_inputs"][0]
    )
    assert roll.trajectories([told]).batch["position_ids"].shape == (1, 12)


def test_a_sample_has_tensors_of_its_own_images_only() -> None:
    told = replace(seen(), images=(FIRST,))
    assert vision.tensors(told)["pixel_values"].shape == (16, 3)
