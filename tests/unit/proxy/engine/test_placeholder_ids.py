"""Which tokens stand for images and videos, told from a model's configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.vision.model_config import placeholder_ids

EYES: dict[str, Any] = {"vision_config": {}}


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        (EYES | {"image_token_id": 9, "video_token_id": 10, "audio_token_id": None}, (9, 10)),
        (EYES | {"image_token_index": 32000}, (32000,)),
        (EYES | {"image_token_id": 7, "image_token_index": 7}, (7,)),
        (EYES, ()),
        ({"image_token_id": 9}, ()),
    ],
)
def test_they_are_those_that_the_configuration_of_a_model_that_sees_names(
    tmp_path: Path, config: dict[str, Any], ids: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert placeholder_ids(tmp_path) == ids


def test_a_folder_without_a_readable_configuration_has_none(tmp_path: Path) -> None:
    assert placeholder_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text("{")
    assert placeholder_ids(tmp_path) == ()
