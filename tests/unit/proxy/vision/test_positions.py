"""Positions of tokens are those that transformers' own models compute for whole sequences."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from proxy.vision import positions
from proxy.vision.positions import Grid, Span, positions_of
from tests.wide import CROSSED

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

KINDS = ["Qwen2VLConfig", "Qwen2_5_VLConfig", "Qwen3VLConfig", "Qwen3VLMoeConfig"]


def config(kind: str) -> object:
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    text = {**small, "intermediate_size": 64, "vocab_size": 100}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    return getattr(transformers, kind)(text_config=text, vision_config={"depth": 1, "spatial_merge_size": 2})


def whole(kind: str, spans: list[Span], grids: list[Grid], tokens: int) -> np.ndarray:
    """The positions that a real model of this kind computes for the sequence as a whole."""
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config(kind))
    kinds = torch.zeros((1, tokens), dtype=torch.int32)
    for start, length in spans:
        kinds[0, start : start + length] = 1
    rows = torch.tensor(grids).reshape(-1, 3)
    found, _ = model.get_rope_index(
        torch.zeros((1, tokens), dtype=torch.long), mm_token_type_ids=kinds, image_grid_thw=rows
    )
    return found[:, 0].numpy()


@CROSSED
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("spans", "grids", "tokens"),
    [
        ([(4, 6)], [(1, 4, 6)], 20),
        ([(0, 8)], [(1, 8, 4)], 8),
        ([(3, 16), (20, 1), (30, 6), (37, 16)], [(1, 2, 32), (1, 2, 2), (1, 6, 4), (1, 32, 2)], 90),
    ],
    ids=["one image", "nothing but an image", "several sizes, one twice"],
)
def test_they_are_those_of_the_model_itself(kind: str, spans: list[Span], grids: list[Grid], tokens: int) -> None:
    found = positions_of(config(kind)).of(spans, grids, tokens)
    assert found is not None and found.dtype == np.int64
    np.testing.assert_array_equal(found, whole(kind, spans, grids, tokens))


def test_a_text_counts_its_tokens_three_times() -> None:
    found = positions_of(config("Qwen3VLConfig")).of([], [], 5)
    assert found is not None and found.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_a_model_without_mrope_has_none() -> None:
    rule = positions_of(transformers.LlavaConfig())
    assert not rule.three and rule.of([(0, 4)], [(1, 4, 4)], 9) is None


def test_they_are_found_by_the_models_folder(tmp_path: Path) -> None:
    from proxy.vision.positions import mrope_positions

    settings = config("Qwen3VLConfig").to_dict()
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    found = mrope_positions(tmp_path, [(1, 4)], [(1, 4, 4)], 7)
    assert found is not None and found.tolist() == [
        [0, 1, 1, 1, 1, 3, 4],
        [0, 1, 1, 2, 2, 3, 4],
        [0, 1, 2, 1, 2, 3, 4],
    ]


def test_the_positions_of_images_of_many_sizes_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "_GRIDS", 2)
    rule = positions_of(config("Qwen2_5_VLConfig"))
    for side in (2, 4, 6, 8):
        rule.of([(0, side * side // 4)], [(1, side, side)], side * side)
    assert rule._image.cache_info().currsize == 2
