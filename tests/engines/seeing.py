"""Prompts with images, and what a plain forward pass of the Hugging Face model makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from proxy.engine.contract import CollectedReply, request_for
from proxy.engine.requests import GenerateRequest
from proxy.images.decode import decode_image
from proxy.images.image_pool import ImagePool
from proxy.images.prompt_images import PromptImages
from proxy.types import Ids, ImageFile, PlacedImage, ids_of
from tests.engines.forward import TOLERANCE

Part = Sequence[int] | ImageFile


class Seen(NamedTuple):
    """A prompt as the renderer makes it: ids with placeholders, and its images."""

    ids: Ids
    placed: tuple[PlacedImage, ...]
    files: tuple[ImageFile, ...]

    @property
    def images(self) -> PromptImages:
        files = {at.digest: file for at, file in zip(self.placed, self.files, strict=False)}
        return PromptImages(self.placed, ImagePool(_read_none, 0), files)

    def request(self, max_tokens: int = 8, temperature: float = 1.0, **sampling: Any) -> GenerateRequest:
        request = request_for(self.ids, max_tokens, temperature)
        request = replace(request, sampling=request.sampling._replace(**sampling))
        return replace(request, images=self.images) if self.placed else request

    def then(self, folder: Path, output: Sequence[int], *parts: Part) -> Seen:
        """The prompt of the next turn: this one, its output, and what is new."""
        more = seen(folder, *parts)
        ahead = len(self.ids) + len(output)
        moved = tuple(placed._replace(start=placed.start + ahead) for placed in more.placed)
        ids = self.ids + ids_of(output) + more.ids
        return Seen(ids, self.placed + moved, self.files + more.files)


async def _read_none(digests: Sequence[str]) -> list[ImageFile]:
    return []


def seen(folder: Path, *parts: Part) -> Seen:
    """The prompt of token ids and images, in order; each image stands between its two markers."""
    config = _model(str(folder)).config
    ids, placed, files = ids_of(), [], []
    for part in parts:
        if isinstance(part, ImageFile):
            length = sum(_tensors(folder, part)["image_grid_thw"].prod(-1).tolist()) // 4
            placed.append(PlacedImage(part.digest, len(ids) + 1, length, part.width, part.height))
            files.append(part)
            part = [config.vision_start_token_id, *[config.image_token_id] * length, config.vision_end_token_id]
        ids += ids_of(part)
    return Seen(ids, tuple(placed), tuple(files))


def plain_logprobs(
    folder: Path, prompt: Seen, output: Sequence[int], temperature: float = 1.0, adapted: Any = None
) -> list[float]:
    """Logprobs of `output` after `prompt` by one forward pass with all pixels; transformers computes the positions.

    `adapted`: the model with an adapter, instead of the one in `folder`.
    """
    import torch

    model = adapted or _model(str(folder))
    ids = torch.tensor([[*prompt.ids, *output]])
    given = _tensors(folder, *prompt.files) if prompt.files else {}
    if given:
        given["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, **given).logits[0, len(prompt.ids) - 1 : -1]
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    return logprobs[range(len(output)), list(output)].tolist()


def check_exact(folder: Path | dict[int, Path], prompt: Seen, reply: CollectedReply, temperature: float = 1.0) -> None:
    """Assert that the logprobs are those of a plain forward pass; with `folder` by version, of each token's version."""
    folders = folder if isinstance(folder, dict) else dict.fromkeys(set(reply.versions), folder)
    of = {version: plain_logprobs(folders[version], prompt, reply.ids, temperature) for version in set(reply.versions)}
    expected = [of[version][place] for place, version in enumerate(reply.versions)]
    assert reply.ids and reply.logprobs == pytest.approx(expected, abs=TOLERANCE)


def check_blind_differs(folder: Path, prompt: Seen, reply: CollectedReply) -> None:
    """Assert that the logprobs are not those of the same ids without pixels."""
    blind = plain_logprobs(folder, Seen(prompt.ids, (), ()), reply.ids)
    assert max(abs(one - other) for one, other in zip(blind, reply.logprobs, strict=True)) > 0.05


def _tensors(folder: Path, *files: ImageFile) -> dict[str, Any]:
    made = _processor(str(folder)).image_processor(
        images=[decode_image(file.data) for file in files], return_tensors="pt"
    )
    return {name: made[name] for name in ("pixel_values", "image_grid_thw")}


@lru_cache(maxsize=4)
def _model(folder: str) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype="float32").eval()


@lru_cache(maxsize=4)
def _processor(folder: str) -> Any:
    from proxy.vision.load_processor import load_processor

    return load_processor(Path(folder))
