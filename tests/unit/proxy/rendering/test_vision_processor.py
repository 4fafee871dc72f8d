"""The processor of a model: what it says of sizes, the tensors of images, and what it is asked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.images.decode import decode_image
from proxy.vision import processor as module
from proxy.vision.load_processor import load_processor
from proxy.vision.processor import VisionProcessor
from tests.vision import KINDS, png
from tests.vision_families import FAMILIES, made
from tokengrove.errors import ConfigurationError
from tokengrove.image_detail import LOW_DETAIL, shown, shown_size

SIZES = ((64, 64), (200, 90), (1100, 700))


@pytest.fixture(scope="session", params=KINDS)
def vision(request: pytest.FixtureRequest, vision_folders: dict[str, Path]) -> VisionProcessor:
    return VisionProcessor.load(vision_folders[request.param])


def pictures(detail: str = "") -> list[tuple[Any, str]]:
    return [(decode_image(png(*size, number)), detail) for number, size in enumerate(SIZES)]


def test_the_tensors_are_those_of_the_processor_and_have_as_many_tokens(vision: VisionProcessor) -> None:
    found = vision.inputs(pictures(), tensors="np")
    own = vision._processor.image_processor([image for image, _ in pictures()], return_tensors="np")
    assert found.keys() == {"pixel_values", "image_grid_thw"}
    assert np.array_equal(found["pixel_values"], own["pixel_values"])
    assert np.array_equal(found["image_grid_thw"], own["image_grid_thw"])
    tokens = [vision.expansion(*size).count(vision.placeholder) for size in SIZES]
    assert [int(grid.prod()) // 4 for grid in found["image_grid_thw"]] == tokens
    assert vision.inputs([]) == {}


def test_low_detail_is_a_smaller_image_for_sizes_and_tensors_alike(vision: VisionProcessor) -> None:
    # Without the processor's own limit, by which the large image has no more tokens either way.
    small = shown(pictures()[2][0], "low")
    assert small.size == (512, 326)
    low, plain = vision.inputs(pictures("low")[2:]), vision.inputs([(small, "")])
    assert (low["pixel_values"] == plain["pixel_values"]).all()
    assert vision.expansion(1100, 700, "low") == vision.expansion(512, 326)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tensors_of_every_family_fit_what_blank_images_said(name: str) -> None:
    vision = VisionProcessor(made(name)[0], Path())
    assert "pixel_values" in vision.inputs(pictures())


def test_tensors_with_other_tokens_than_the_prompt_are_an_error(vision: VisionProcessor) -> None:
    other = VisionProcessor(vision._processor, Path())
    other._texts[200, 90] = other.placeholder
    with pytest.raises(ValueError, match="expands these images to other tokens than blank images of their sizes"):
        other.inputs(pictures())


def test_sizes_are_asked_once_and_kept_up_to_a_bound(vision_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = VisionProcessor.load(vision_folder)
    asked: list[tuple[int, int]] = []
    expanded = vision._expanded

    def counted(size: tuple[int, int]) -> str:
        asked.append(size)
        return expanded(size)

    monkeypatch.setattr(vision, "_expanded", counted)
    monkeypatch.setattr(module, "_SIZES", 2)
    for width in (30, 60, 30, 90, 30, 60):
        vision.expansion(width, 30)
    assert asked == [(30, 30), (60, 30), (90, 30), (60, 30)]
    assert (vision.knows(30, 30), vision.knows(90, 30)) == (True, False)


def test_threads_get_the_same_answers(vision: VisionProcessor) -> None:
    sizes = [(8 + 30 * number, 40) for number in range(12)] * 3
    alone = [vision._expanded(size) for size in sizes[:12]] * 3
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda size: vision.expansion(*size), sizes)) == alone


@given(width=st.integers(1, 9000), height=st.integers(1, 9000), detail=st.sampled_from(["", "low", "high"]))
def test_low_detail_bounds_the_longer_side_and_keeps_the_shape(width: int, height: int, detail: str) -> None:
    shown_width, shown_height = shown_size(width, height, detail)
    if detail != "low" or max(width, height) <= LOW_DETAIL:
        assert (shown_width, shown_height) == (width, height)
        return
    assert max(shown_width, shown_height) == LOW_DETAIL
    assert min(shown_width, shown_height) >= 1
    assert abs(shown_width * max(width, height) - width * LOW_DETAIL) <= max(width, height)
    assert shown_size(shown_width, shown_height, "low") == (shown_width, shown_height)


def test_a_processor_without_a_token_for_images_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no image_token"):
        VisionProcessor(object(), Path())


def test_a_folder_without_a_processor_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "vision_config": {}}')
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"the processor of the model in .* cannot be loaded: ") as error:
        load_processor(tmp_path)
    assert "\n" not in str(error.value)


def test_code_in_a_models_folder_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own:\n    pass\n")
    own = '{"auto_map": {"AutoProcessor": "own.Own"}, "processor_class": "Own"}'
    (tmp_path / "config.json").write_text('{"model_type": "own", "vision_config": {}}')
    for name in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text(own)
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        load_processor(tmp_path)
    assert not ran.exists()
