"""The tensors that the embedded SGLang gets: made once, in the model's dtype, joined, with the places of images."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from proxy.engine.sglang.image_inputs import ImageInputs
from proxy.images.image_pool import ImagePool
from proxy.images.prompt_images import PromptImages
from proxy.types import Ids, ImageFile, PlacedImage, ids_of
from tests.engines.pictures import drawn
from tests.engines.spans import around
from tests.vision import noting_loops
from tokengrove.errors import EngineFailed, InvalidRequest

RED, BLUE = drawn(1, 84, 56), drawn(2, 56, 56)


class Processor:
    """Gives each 28 x 28 pixels a row of its colour. `made`: the details of the images, in order."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self.shape: tuple[int, ...] = (3,)

    def inputs(self, images: Sequence[tuple[Any, str]]) -> Mapping[str, Any]:
        self.go.wait()
        [(image, detail)] = images
        self.made.append(detail)
        if image.width == 1:
            raise ValueError("too narrow")
        rows = (image.width // 28) * (image.height // 28)
        pixels = torch.full((rows, *self.shape), 1 / 3)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, image.height // 28, image.width // 28]])}


async def nowhere(digests: Sequence[str]) -> Sequence[ImageFile]:
    return ()


def images(placed: tuple[PlacedImage, ...], *files: ImageFile) -> PromptImages:
    return PromptImages(placed, ImagePool(nowhere, 2**20), {file.digest: file for file in files})


async def data_of(inputs: ImageInputs, ids: Ids, placed: tuple[PlacedImage, ...], *files: ImageFile) -> dict[str, Any]:
    [data] = await inputs.of(images(placed, *files), ids)
    return data


async def test_the_tensors_of_all_images_are_joined_in_one_dict_with_their_places() -> None:
    ids, placed = around(RED, BLUE, RED)
    processor = Processor()
    data = await data_of(ImageInputs(processor), ids, placed, RED, BLUE)
    assert data["format"] == "processor_output" and data["pixel_values"].shape == (16, 3)
    assert data["image_grid_thw"].tolist() == [[1, 2, 3], [1, 2, 2], [1, 2, 3]]
    assert data["offsets"] == [(10, 15), (21, 24), (30, 35)] and len(processor.made) == 2


async def test_no_image_for_the_engine_is_decoded_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, placed = around(RED, BLUE)
    held = noting_loops(monkeypatch)
    await data_of(ImageInputs(Processor()), ids, placed, RED, BLUE)
    assert held == [False, False]


async def test_pixels_are_kept_in_the_dtype_of_the_model_and_grids_as_they_are() -> None:
    ids, placed = around(RED)
    data = await data_of(ImageInputs(Processor(), torch.bfloat16), ids, placed, RED)
    assert data["pixel_values"].dtype is torch.bfloat16 and data["image_grid_thw"].dtype is torch.int64


async def test_an_image_whose_tokens_have_others_between_them_is_found_by_sglang() -> None:
    ids, placed = around(RED, BLUE)
    ids[12] = 1
    assert "offsets" not in await data_of(ImageInputs(Processor()), ids, placed, RED, BLUE)


async def test_an_image_is_made_once_for_requests_that_come_together_and_later() -> None:
    ids, placed = around(RED, BLUE)
    processor = Processor()
    processor.go.clear()
    inputs = ImageInputs(processor)
    both = [asyncio.create_task(inputs.of(images(placed, RED, BLUE), ids)) for _ in range(2)]
    await asyncio.sleep(0)
    both[0].cancel()
    processor.go.set()
    await both[1]
    await inputs.of(images(placed), ids)
    assert processor.made == ["", ""]
    low = tuple(image._replace(detail="low") for image in placed)
    await inputs.of(images(low, RED, BLUE), ids)
    assert processor.made[2:] == ["low", "low"]


async def test_an_image_that_others_made_while_its_bytes_were_read_counts_once() -> None:
    arrived = asyncio.Event()

    async def late(digests: Sequence[str]) -> Sequence[ImageFile]:
        await arrived.wait()
        return (RED,)

    ids, placed = around(RED)
    processor = Processor()
    inputs = ImageInputs(processor)
    behind = asyncio.create_task(inputs.of(PromptImages(placed, ImagePool(late, 2**20), {}), ids))
    await asyncio.sleep(0)
    await inputs.of(images(placed, RED), ids)
    held = inputs._bytes
    arrived.set()
    await behind
    assert processor.made == [""] and inputs._bytes == held


async def test_no_more_bytes_are_kept_than_allowed() -> None:
    processor = Processor()
    inputs = ImageInputs(processor, most_bytes=100)
    for _ in range(2):
        for file in (RED, BLUE):
            ids, placed = around(file)
            await inputs.of(images(placed, file), ids)
    assert len(processor.made) == 4 and inputs._bytes <= 100


async def test_failures_name_what_failed_and_are_not_kept() -> None:
    processor = Processor()
    inputs = ImageInputs(processor)
    thin = drawn(1, 1, 56)
    ids, placed = ids_of([1, 600, 1]), (PlacedImage(thin.digest, 1, 1, 1, 56),)
    for _ in range(2):
        with pytest.raises(EngineFailed, match="too narrow"):
            await inputs.of(images(placed, thin), ids)
    assert len(processor.made) == 2
    with pytest.raises(InvalidRequest, match="is not stored"):
        await inputs.of(images(placed), ids)
    ids, placed = around(RED, BLUE)
    await inputs.of(images(placed[:1], RED), ids)
    processor.shape = (3, 2)
    with pytest.raises(EngineFailed, match="cannot be joined"):
        await inputs.of(images(placed, BLUE), ids)
