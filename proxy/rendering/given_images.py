"""Locates images in prompts that a client sent as token ids: at their tokens, or at one placeholder token each.

A prompt may be expanded already (as trainers keep prompts) or have one placeholder for each image (as clients of
inference servers send them). In both cases, the result is the expanded prompt that the model sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proxy.rendering.image_tokens import ImageTokens
from proxy.types import Ids, ImagePart, PlacedImage, ids_of
from tokengrove.errors import InvalidRequest


def locate(tokens: ImageTokens, ids: Ids, images: Sequence[ImagePart]) -> tuple[Ids, tuple[PlacedImage, ...]]:
    """Return the expanded ids, and the place of each image. `images`: in the order of the prompt.

    Raises InvalidRequest (param input_ids) if the tokens do not match the images.
    """
    marks = np.flatnonzero(np.isin(np.frombuffer(ids, np.int32), [tokens.token, tokens.mark])).tolist()
    if not marks and not images:
        return ids, ()
    out, before, placed, next_mark = ids_of(), 0, list[PlacedImage](), 0
    for number, image in enumerate(images):
        if next_mark == len(marks):
            raise InvalidRequest(
                f"the prompt has the tokens of {number} images, but {len(images)} images came", param="input_ids"
            )
        at, core = marks[next_mark], tokens.core(image)
        begin = at - _first(core, (tokens.token, tokens.mark))
        if begin >= before and ids[begin : begin + len(core)] == core:
            end = begin + len(core)
        elif ids[at] == tokens.mark and not _goes_on(ids, at, tokens.token):
            begin, end, core = at, at + 1, tokens.expanded(image)
        else:
            run = _run(ids, at, tokens.token)
            raise InvalidRequest(
                f"image {number} takes {tokens.count(image)} tokens for its {image.width} x {image.height} pixels, but "
                f"the prompt has {run} in its place; send these, or one token {tokens.vision.placeholder} for it",
                param="input_ids",
            )
        out += ids[before:begin]
        placed += tokens.placed(core, [image], len(out))
        out += core
        before = end
        while next_mark < len(marks) and marks[next_mark] < end:
            next_mark += 1
    if next_mark < len(marks):
        raise InvalidRequest(
            f"the prompt has more tokens of images than the {len(images)} images that came take", param="input_ids"
        )
    return out + ids[before:], tuple(placed)


def _first(core: Ids, marks: Sequence[int]) -> int:
    return next(at for at, token in enumerate(core) if token in marks)


def _goes_on(ids: Ids, at: int, token: int) -> bool:
    return at + 1 < len(ids) and ids[at + 1] == token


def _run(ids: Ids, at: int, token: int) -> int:
    end = at
    while end < len(ids) and ids[end] == token:
        end += 1
    return end - at
