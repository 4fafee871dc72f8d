"""Games as pictures: what differs in a map differs in its picture, and the rules name the colours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

gem = pytest.importorskip("gem")

from tokengrove.roll.envs.games import register_games  # noqa: E402


def made(env_type: str, **config: Any) -> Any:
    return register_games().make(env_type, render_mode="rgb_array", **config)


@pytest.mark.parametrize(
    ("env_type", "config", "shape"),
    [
        ("frozen_lake", {"size": 4}, (128, 128, 3)),
        ("frozen_lake", {"size": 3, "cell_pixels": 8}, (24, 24, 3)),
        ("sokoban", {"dim_room": [6, 7], "num_boxes": 1}, (96, 112, 3)),
    ],
)
def test_an_observation_is_a_picture_of_the_map(env_type: str, config: dict[str, Any], shape: tuple[int, ...]) -> None:
    env = made(env_type, **config)
    picture, info = env.reset(seed=3)
    assert picture.shape == shape and picture.dtype == np.uint8
    assert "red disc" in info["env_instruction"] and "The signs of the map" not in info["env_instruction"]
    assert np.array_equal(env.reset(seed=3)[0], picture)
    assert isinstance(env.render("text"), str)


@pytest.mark.parametrize("env_type", ["frozen_lake", "sokoban"])
def test_each_content_of_a_cell_has_a_look_of_its_own(env_type: str) -> None:
    """By the text of the same maps, over many games: equal signs look equal, and different ones different."""
    looks: dict[bytes, str] = {}
    signs = set()
    config: dict[str, Any] = {"frozen_lake": {"is_slippery": False}, "sokoban": {"dim_room": [6, 6], "num_boxes": 1}}
    env = made(env_type, **config[env_type])
    for seed in range(8):
        env.reset(seed=seed)
        for number in (2, 3, 4, 1, 3):
            pixels, picture = env.cell_pixels, env.render()
            for row, line in enumerate(env.render("text").split("\n")):
                for column, sign in enumerate(line):
                    cell = picture[row * pixels : (row + 1) * pixels, column * pixels : (column + 1) * pixels]
                    assert looks.setdefault(cell.tobytes(), sign) == sign
                    signs.add(sign)
            env.step(f"<answer>{env.ACTION_LOOKUP[number % 4 or 1]}</answer>")
    assert len(looks) == len(signs) >= 4
