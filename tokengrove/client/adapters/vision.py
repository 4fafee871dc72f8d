"""The images of samples, in the forms that trainers of vision-language models need.

An export includes them with `multi_modal_inputs`: the output of the model's own processor for the images of a sample,
in the order of their tokens. No adapter returns a sample with images without them: a trainer that does not see the
model's inputs would compute different logprobs.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tokengrove.client.images import ImageBytes
from tokengrove.client.libraries import library
from tokengrove.client.tensors import Array
from tokengrove.client.values import Json, Sample
from tokengrove.errors import InvalidRequest
from tokengrove.image_detail import shown

if TYPE_CHECKING:
    import torch

Images = Mapping[str, ImageBytes]
"""`Export.images`: images by digest, with their bytes as received."""


def has_vision(samples: Iterable[Sample]) -> bool:
    """Whether any of the samples has tensors of images, or positions in time, height and width.

    Raises InvalidRequest for a sample with images whose tensors the export left out.
    """
    found = False
    for sample in samples:
        if sample.images and not sample.has_inputs:
            raise InvalidRequest(
                f"sample {sample.interaction_id!r} has images: export with multi_modal_inputs=True, so that the "
                "trainer gets what the model saw",
                param="multi_modal_inputs",
            )
        found = found or sample.has_inputs or has_positions([sample])
    return found


def has_positions(samples: Iterable[Sample]) -> bool:
    """Whether any of the samples has positions in time, height and width. Some vision models only count tokens."""
    return any(sample.mrope_position_ids is not None for sample in samples)


def arrays(sample: Sample) -> dict[str, Array]:
    """The processor's output for the images of a sample, by the processor's names; empty without images.

    For Qwen's models: `pixel_values` float32 [patches, values of a patch] and `image_grid_thw` int64 [images, 3].
    """
    return sample.multi_modal_inputs or {}


def arrays_before(sample: Sample, end: int) -> dict[str, Array]:
    """`arrays` of the images that start before token `end`."""
    return arrays(replace(sample, images=_before(sample, end)))


def _before(sample: Sample, end: int) -> tuple[Mapping[str, Json], ...]:
    return tuple(image for image in sample.images if image["start"] < end)


def tensors(sample: Sample) -> dict[str, torch.Tensor]:
    """`arrays` as tensors, which share the memory of contiguous arrays. Raises InvalidRequest without torch."""
    torch = library("torch")
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays(sample).items()}


def base64_of(sample: Sample, images: Images, end: int) -> list[str]:
    """The images that start before token `end`, as received, in base64, as in AReaL's requests."""
    found = [_file(image["digest"], images).data for image in _before(sample, end)]
    return [b64encode(data).decode("ascii") for data in found]


def verl_inputs(sample: Sample) -> dict[str, torch.Tensor]:
    """`tensors` as in verl's agent loops: with `images_seqlens`, the patches of each image."""
    found = tensors(sample)
    if (grid := found.get("image_grid_thw")) is not None:
        found["images_seqlens"] = (grid[:, 1] * grid[:, 2]).repeat_interleave(grid[:, 0])
    return found


def positions(sample: Sample, part: slice = slice(None)) -> Array:
    """Positions int64 [3, L], from 0, of a part that begins with text. They count up if the sample has none."""
    if sample.mrope_position_ids is None:
        length = len(sample.input_ids[part])
        return np.broadcast_to(np.arange(length), (3, length)).astype(np.int64)
    chosen = sample.mrope_position_ids[:, part].astype(np.int64)
    return chosen - chosen[:, :1]


def token_types(sample: Sample) -> Array:
    """`mm_token_type_ids` int64 [L]: 1 on the tokens of images, 0 on all others."""
    types = np.zeros(len(sample.input_ids), np.int64)
    for image in sample.images:
        types[image["start"] : image["start"] + image["length"]] = 1
    return types


def check_whole(sample: Sample, first: int, last: int) -> None:
    """Raise InvalidRequest if an image is not between these tokens: the rest would not match its tensors."""
    for image in sample.images:
        if image["start"] < first or image["start"] + image["length"] > last:
            raise InvalidRequest(
                f"sample {sample.interaction_id!r} cannot be truncated, as that would cut off an image; raise "
                "prompt_length and response_length, or give on_too_long='drop'",
                param="on_too_long",
            )


def files(sample: Sample, images: Images) -> list[bytes]:
    """The bytes of the images of a sample, as received, in order. Raises InvalidRequest for a missing image."""
    return [_file(each["digest"], images).data for each in sample.images]


def pictures(sample: Sample, images: Images) -> list[Any]:
    """The images of a sample as PIL images, in the size of the processor's input.

    Raises InvalidRequest without Pillow, and for a missing image.
    """
    return [_shown(_file(each["digest"], images), each) for each in sample.images]


def _shown(image: ImageBytes, placed: Mapping[str, Json]) -> Any:
    return shown(image.pillow(), placed.get("detail") or "")


def packed(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """The tensors of all samples, concatenated, as a processor returns them for a batch."""
    torch = library("torch")
    each = [tensors(sample) for sample in samples]
    names = dict.fromkeys(name for one in each for name in one)
    return {name: torch.cat([one[name] for one in each if name in one]) for name in names}


def _file(digest: str, images: Images) -> ImageBytes:
    if digest not in images or not images[digest].data:
        message = f"the image {digest} is not among the images given; export with images='bytes', and give its images"
        raise InvalidRequest(message, param="images")
    return images[digest]
