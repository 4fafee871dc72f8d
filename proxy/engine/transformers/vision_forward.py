"""The forward pass of continuous batching with images: hooks on the model insert features and positions.

The batch knows only ids and the order of tokens. Before the model runs a step, the ids of images become the model's
placeholder again, and each token gets its three positions. Before the text model runs, features replace the embeddings
of placeholders. A step without images is unchanged. The tokens of an image may be split over several steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from proxy.engine.transformers.batching import StepEntry
from proxy.engine.transformers.seen_images import Features, SeenImage, SeenImages
from proxy.engine.transformers.seen_prompt import PlacedSight, SeenPrompt

if TYPE_CHECKING:
    import torch

Segment = tuple[SeenPrompt | None, int, int]
"""The tokens of one request in a step: its prompt (None without images), the position of the first, their number."""


class _Step(NamedTuple):
    """The ascending places of image tokens in the step, and their features."""

    places: torch.Tensor
    features: Features


class VisionForward:
    """The hooks of one model.

    `entries` returns the requests of the current step, each with its `SeenPrompt` in `carried` if it has images.
    `failed` is called with an image and the error if its features cannot be computed; its requests must fail.
    """

    def __init__(
        self,
        model: Any,
        images: SeenImages,
        image_token: int,
        entries: Callable[[], Sequence[StepEntry]],
        failed: Callable[[SeenImage, Exception], None],
    ) -> None:
        self._images, self._image_token = images, image_token
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self._entries, self._failed = entries, failed
        self._step: _Step | None = None
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        model.model.language_model.register_forward_pre_hook(self._before_text_model, with_kwargs=True)

    def _before_model(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._step = None
        segments: list[Segment] = [(entry.carried, entry.first, entry.processed) for entry in self._entries()]
        if all(prompt is None for prompt, _, _ in segments):
            return None
        ids = kwargs["input_ids"]
        self._step = self._visual(segments, ids.device)
        known = ids.where(ids < self._vocab_size, self._image_token)
        return args, {**kwargs, "input_ids": known, **_positions(segments, kwargs["position_ids"])}

    def _before_text_model(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        step, self._step = self._step, None
        if step is None:
            return None
        import torch

        embeds = kwargs["inputs_embeds"].clone()
        embeds[0, step.places] = step.features.embeds.to(embeds.dtype)
        changed = {**kwargs, "inputs_embeds": embeds}
        if step.features.deepstack:
            mask = torch.zeros(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
            mask[0, step.places] = True
            changed |= {"visual_pos_masks": mask, "deepstack_visual_embeds": [*step.features.deepstack]}
        return args, changed

    def _visual(self, segments: Sequence[Segment], device: torch.device) -> _Step | None:
        import torch

        places, parts, offset = [], [], 0
        for prompt, first, count in segments:
            for sight, start, stop in prompt.between(first, count) if prompt is not None else ():
                begin = offset + sight.start + start - first
                places.append(torch.arange(begin, begin + stop - start))
                parts.append(self._features(sight).part(start, stop))
            offset += count
        if not parts:
            return None
        layers = zip(*(part.deepstack for part in parts), strict=True)
        features = Features(torch.cat([part.embeds for part in parts]), tuple(torch.cat(layer) for layer in layers))
        return _Step(torch.cat(places).to(device), features)

    def _features(self, sight: PlacedSight) -> Features:
        """The features of an image, or zeros on failure: an exception would end all requests of the batch."""
        try:
            return self._images.features(sight.image, sight.source)
        except Exception as error:
            self._failed(sight.image, error)
            return self._images.no_features(sight.image)


def _positions(segments: Sequence[Segment], flat: torch.Tensor) -> dict[str, Any]:
    """The positions [3, 1, tokens] of a step, if its prompts have them. `flat`: the positions of the batch."""
    import numpy as np
    import torch

    if any(prompt is not None and prompt.positions is None for prompt, _, _ in segments):
        return {}
    parts = [
        np.broadcast_to(np.arange(first, first + count), (3, count))
        if prompt is None
        else prompt.positions_from(first, count)
        for prompt, first, count in segments
    ]
    return {"position_ids": torch.from_numpy(np.concatenate(parts, axis=1)).to(flat.device).unsqueeze(1)}
