"""Prompts with drawn pictures for models that see, and the logprobs of a plain forward pass over them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

from proxy.engine.contract import request_for
from proxy.engine.requests import GenerateRequest
from proxy.images.decode import decode_image, read_image
from proxy.images.image_pool import ImagePool
from proxy.images.prompt_images import PromptImages
from proxy.types import Ids, ImageFile, PlacedImage, ids_of
from proxy.vision.processor import VisionProcessor


def drawn(seed: int, width: int = 120, height: int = 90, kind: str = "PNG") -> ImageFile:
    """A picture of coloured squares, the same for equal arguments."""
    from PIL import Image

    colours = random.Random(seed)
    small = Image.new("RGB", (6, 5))
    small.putdata([tuple(colours.randrange(256) for _ in range(3)) for _ in range(30)])
    out = BytesIO()
    small.resize((width, height), Image.Resampling.NEAREST).save(out, kind)
    return read_image(out.getvalue())


class Prompts:
    """Makes prompts for the model in `folder`, as a renderer does: images are expanded by the model's processor."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._processor = VisionProcessor.load(folder)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def of(self, *parts: str | ImageFile, detail: str = "") -> tuple[Ids, tuple[PlacedImage, ...]]:
        """The ids of texts and images, and where the images are."""
        ids, placed = ids_of(), []
        for part in parts:
            if isinstance(part, str):
                ids.extend(self._tokenizer.encode(part, add_special_tokens=False))
                continue
            seen = self._tokenizer.encode(self._processor.expansion(part.width, part.height, detail))
            ids.extend(self._tokenizer.encode("<|vision_start|>"))
            placed.append(PlacedImage(part.digest, len(ids), len(seen), part.width, part.height, detail))
            ids.extend([*seen, *self._tokenizer.encode("<|vision_end|>")])
        return ids, tuple(placed)


async def _nowhere(digests: Sequence[str]) -> Sequence[ImageFile]:
    return ()


def asks(ids: Ids, placed: tuple[PlacedImage, ...], files: Iterable[ImageFile], tokens: int, **sampling: Any) -> Any:
    """A request to continue a prompt with images."""
    request: GenerateRequest = request_for(ids, tokens, **sampling)
    request.images = PromptImages(placed, ImagePool(_nowhere, 2**30), {file.digest: file for file in files})
    return request


def seen_logprobs(
    folder: Path, prompt: Ids, images: Sequence[ImageFile], output: Sequence[int], without: Sequence[int] = ()
) -> list[float]:
    """Logprobs of `output` at temperature 1 after a prompt with images, by one forward pass without a cache.

    `without`: tokens that have no part in the distribution.
    """
    import torch

    model, processor = _model(str(folder)), VisionProcessor.load(folder)
    tensors = processor.inputs([(decode_image(image.data), "") for image in images])
    ids = torch.tensor([[*prompt, *output]])
    kinds = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **tensors).logits[0, len(prompt) - 1 : -1]
    logits[:, list(without)] = float("-inf")
    return logits.log_softmax(-1)[range(len(output)), list(output)].tolist()


@lru_cache(maxsize=2)
def _model(folder: str) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype="float32")
