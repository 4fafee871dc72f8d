"""Images of outputs for the trainer: tensors and positions of the samples that the sessions recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokengrove.client import AsyncClient, Sample
from tokengrove.client.adapters import vision
from tokengrove.client.adapters.parts import objects
from tokengrove.client.image_urls import ImageUrls, digest_of_url
from tokengrove.errors import InvalidRequest
from tokengrove.verl.outputs import AgentLoopOutput


async def add_sample(output: AgentLoopOutput, client: AsyncClient, session_id: str) -> None:
    """Add the recorded sample with the same ids to an output with images; its images have their tensors.

    Of several such samples, the one with the same images is used: images of one size have the same tokens. Ids after
    the last sampled id are cut off unless the model has seen them, since their images have no known tokens. Raises
    InvalidRequest if the session has no such sample, or several of which none has the images.
    """
    if not (images := (output.multi_modal_data or {}).get("images")):
        return
    how: Any = {"layout": "concat", "multi_modal_inputs": "auto"}
    export = await client.export(session_id=session_id, **how)
    ids = [*output.prompt_ids, *output.response_ids]
    sampled = max((at + 1 for at, bit in enumerate(output.response_mask) if bit), default=0)
    least = len(output.prompt_ids) + sampled
    same = [sample for sample in export.samples if sample.input_ids[:least].tolist() == ids[:least]]
    if not same:
        raise InvalidRequest(
            "the loop returned ids with images that are not the beginning of a sample of its session, so the tokens "
            "of its images are unknown",
            param="prompt_ids",
        )
    found = same[0] if len(same) == 1 else await asyncio.to_thread(_with_images, same, images)
    if found.input_ids[: len(ids)].tolist() != ids:
        _cut(output, sampled)
    end = len(output.prompt_ids) + len(output.response_ids)
    if any(image["start"] + image["length"] > end for image in found.images):
        raise InvalidRequest(
            f"the loop returned {end} ids, but its session recorded an image after them: return all of the "
            "trajectory, or raise response_length",
            param="response_ids",
        )
    output.sample = found


def _with_images(samples: Sequence[Sample], images: Any) -> Sample:
    """The first sample with these images, of samples with equal ids. Raises InvalidRequest if they differ and none
    has them."""
    shown = [digest_of_url(url) for url in ImageUrls().urls(images)]
    recorded = [[image["digest"] for image in sample.images[: len(shown)]] for sample in samples]
    if all(digests == recorded[0] for digests in recorded):
        return samples[0]
    if shown not in recorded:
        raise InvalidRequest(
            f"the session recorded {len(samples)} samples with the ids of the loop and different images, but none has "
            "the images of 'multi_modal_data': return the images that were given as image_data",
            param="multi_modal_data",
        )
    return samples[recorded.index(shown)]


def _cut(output: AgentLoopOutput, length: int) -> None:
    for name in ("response_ids", "response_mask", "response_logprobs"):
        if (values := getattr(output, name)) is not None:
            setattr(output, name, values[:length])
    output.check()


def columns(outputs: Sequence[AgentLoopOutput], attention: NDArray[Any], width: int) -> dict[str, NDArray[Any]]:
    """`multi_modal_inputs`, and `position_ids` [B, 4, P + R] if the model assigns positions to images, as in verl's
    worker; {} if no output has images.

    `attention` is [B, P + R]; `width` is P.
    """
    if not any(output.sample for output in outputs):
        return {}
    samples: list[Sample | None] = [output.sample for output in outputs]
    inputs = {
        "multi_modal_inputs": objects([{} if sample is None else vision.verl_inputs(sample) for sample in samples])
    }
    if not vision.has_positions(sample for sample in samples if sample is not None):
        return inputs
    found = np.zeros((len(outputs), 4, attention.shape[1]), np.int64)
    for line, output, sample in zip(found, outputs, samples, strict=True):
        start, length = width - len(output.prompt_ids), len(output.prompt_ids) + len(output.response_ids)
        counted = np.broadcast_to(np.arange(length), (3, length))
        of_images = counted if sample is None else vision.positions(sample, slice(0, length))
        line[:, start : start + length] = np.concatenate([np.arange(length)[None], of_images])
    return {"position_ids": found, **inputs}
