"""What is kept of images as the model sees them, and when it is made again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from proxy.engine.transformers.seen_images import SeenImages, SeenName
from tests.vision import image_file

torch = pytest.importorskip("torch")
pytest.importorskip("PIL")
FILE = image_file(64, 48, 1)
NAME = SeenName(FILE.digest, "")


class Model:
    """Sees two tokens in any image, and counts how often it looked. `broken`: it cannot see."""

    device, dtype = "cpu", torch.float32
    config = SimpleNamespace(
        vision_config=SimpleNamespace(spatial_merge_size=2), get_text_config=lambda: SimpleNamespace(hidden_size=3)
    )

    def __init__(self) -> None:
        self.looked = 0

    def get_image_features(self, **tensors: Any) -> Any:
        self.looked += 1
        return SimpleNamespace(pooler_output=(torch.full((2, 3), float(self.looked)),))


class Processor:
    """Gives each image 1 x 2 x 4 patches."""

    def inputs(self, images: Any) -> dict[str, Any]:
        return {"image_grid_thw": torch.tensor([[1, 2, 4]]), "pixel_values": torch.zeros(8, 5)}


def seeing(most_bytes: int = 2**20) -> tuple[SeenImages, Model]:
    model, processor = Model(), Processor()
    return SeenImages(model, processor, 100, most_bytes), model  # type: ignore[arg-type]


def file() -> Any:
    return FILE


def test_an_image_is_prepared_again_when_its_keys_and_values_and_features_are_gone() -> None:
    images, model = seeing()
    assert images.needs(NAME)
    seen = images.know(NAME, file)
    images.features(seen, file)
    images.forget()
    assert not images.needs(NAME)
    images.emptied()
    assert images.needs(NAME)
    assert images.know(NAME, file) is seen
    assert not images.needs(NAME)
    assert (images.features(seen, file).embeds == 2).all() and model.looked == 2


def test_features_of_the_same_weights_are_computed_once() -> None:
    images, model = seeing()
    seen = images.know(NAME, file)
    assert images.features(seen, file) is images.features(seen, file)
    assert (model.looked, images.held_bytes) == (1, 2 * 3 * 4)
    images.forget()
    assert images.held_bytes == 0


def test_an_image_that_could_not_be_seen_gets_another_id_when_it_comes_again() -> None:
    images, _ = seeing()
    first = images.know(NAME, file)
    assert images.no_features(first).embeds.tolist() == [[0.0] * 3] * 2
    assert images.know(NAME, file).token != first.token


def test_each_image_and_each_detail_has_an_id_of_its_own_above_the_vocabulary() -> None:
    images, _ = seeing()
    tokens = [images.know(SeenName(*name), file).token for name in (("a", ""), ("a", "low"), ("b", ""), ("a", ""))]
    assert tokens == [100, 101, 102, 100]
