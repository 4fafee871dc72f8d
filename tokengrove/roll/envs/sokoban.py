"""Sokoban as text or pictures: ROLL's `sokoban`.

An episode depends on its seed and its actions only: the environment has its own random generator.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gem import Env

from tokengrove.errors import InvalidRequest
from tokengrove.roll.envs.actions import METRICS_AGG_MODE, by_number, instructions, parse_action, text_of
from tokengrove.roll.envs.pictures import RENDER_MODES, Tile, draw
from tokengrove.roll.envs.pictures import cell_pixels as size_of_cells
from tokengrove.roll.envs.settings import check_parameters
from tokengrove.roll.envs.sokoban_room import STEPS, Room, generate_room

_RULES = (
    "You play Sokoban. You are the player, and all boxes have to be pushed onto targets. You push a box by moving "
    "towards it from the cell beside it; boxes cannot be pulled, nor pushed into walls or other boxes. Give one action "
    "in each turn, in the form <answer>Right</answer>."
)
_STEP, _BOX, _SOLVED = -0.1, 1.0, 10.0
"""Rewards of gym-sokoban: of each step, of each box moved onto a target (negative: off it), of the solution."""


class SokobanEnv(Env):  # type: ignore[misc]
    """A room with boxes. An observation is its map as text, an action a text with the name of a direction.

    With `render_mode` `rgb_array` an observation is a picture, uint8 [height, width, 3], with cells of `cell_pixels` x
    `cell_pixels` pixels.

    `dim_room`: rows and columns. `max_steps`: the number of steps after which the episode is over (`terminated` and
    `truncated`). `search_depth`, `num_gen_steps`: see `generate_room`. `grid_lookup`: the signs of the contents of a
    cell (0 wall, 1 floor, 2 target, 3 box on target, 4 box, 5 player, 6 player on target); `grid_vocab`: the meanings
    of the signs. `action_lookup`: the names of 1 up, 2 down, 3 left, 4 right. `env_instruction`: replaces the rules.
    `action_pattern`, `special_token_list`: see `parse_action`. `format_penalty` is added to the reward of a step
    without a valid action. Other rewards are those of gym-sokoban. Raises InvalidRequest for unknown parameters.
    """

    render_modes: ClassVar[Sequence[str]] = RENDER_MODES

    def __init__(
        self,
        render_mode: str = "text",
        dim_room: Sequence[int] = (10, 10),
        max_steps: int = 20,
        num_boxes: int = 4,
        search_depth: int = 300,
        grid_lookup: Mapping[Any, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        action_lookup: Mapping[Any, str] | None = None,
        env_instruction: str | None = None,
        format_penalty: float = 0.0,
        action_pattern: str = "<answer>(.*?)</answer>",
        special_token_list: Sequence[str] | None = ("<|im_start|>", "<|im_end|>"),
        num_gen_steps: int | None = None,
        cell_pixels: int = 16,
        **others: Any,
    ) -> None:
        check_parameters("sokoban", _PARAMETERS, others, render_mode, self.render_modes)
        self.cell_pixels = size_of_cells(cell_pixels)
        rows, columns = dim_room
        self.dim_room = (int(rows), int(columns))
        self.max_steps, self.num_boxes = max_steps, num_boxes
        self.search_depth, self.num_gen_steps = search_depth, num_gen_steps
        self.GRID_LOOKUP = by_number(grid_lookup or dict(enumerate("#_O√XPS")))
        self.GRID_VOCAB = dict(grid_vocab or dict(zip(self.GRID_LOOKUP.values(), _CONTENTS, strict=False)))
        self.ACTION_LOOKUP = by_number(action_lookup or {1: "Up", 2: "Down", 3: "Left", 4: "Right"})
        if not set(self.ACTION_LOOKUP) <= {1, 2, 3, 4}:
            raise InvalidRequest("action_lookup names 1 up, 2 down, 3 left and 4 right", param="action_lookup")
        self.env_instruction = env_instruction or _RULES
        self.format_penalty, self.action_pattern = format_penalty, action_pattern
        self.special_token_list, self.render_mode = special_token_list, render_mode
        self.num_env_steps = 0
        self.room: Room | None = None

    def get_instructions(self) -> str:
        """The rules, the signs of the map (for pictures, a description) and the actions."""
        is_text = self.render_mode == "text"
        told = self.env_instruction if is_text or self.env_instruction != _RULES else f"{_RULES} {_COLOURS}"
        return instructions(told, self.GRID_VOCAB if is_text else {}, self.ACTION_LOOKUP)

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the game of `seed`; by default a random game. `info` has `env_instruction`."""
        draw = random.Random(seed)
        self.room = generate_room(draw, self.dim_room, self.num_boxes, self.search_depth, self.num_gen_steps)
        self.num_env_steps = 0
        return self.render(), {"env_instruction": self.get_instructions()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move by `action`. A step without a valid action counts, and moves nothing."""
        return self.play(self.parse_action(text_of(action)))

    def play(self, chosen: Mapping[str, Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make the step of a result of `parse_action`, which may have no action."""
        room, number = self._room(), chosen["action"]
        self.num_env_steps += 1
        before = room.solved_boxes
        moved = number is not None and room.push(STEPS[number - 1])
        penalty = self.format_penalty if number is None else 0.0
        solved = room.solved_boxes == self.num_boxes
        reward = _STEP + _BOX * (room.solved_boxes - before) + (_SOLVED if solved else 0.0) + penalty
        over = solved or self.num_env_steps >= self.max_steps
        info = {
            "metrics": {
                "action_is_effective": moved,
                "action_is_valid": number is not None,
                "success": solved,
                "format_penalty": penalty,
            },
            "metrics_agg_mode": dict(METRICS_AGG_MODE),
            "action_desc": self._described(chosen, moved),
            **chosen,
        }
        return self.render(), reward, over, over and not solved, info

    def parse_action(self, text: str) -> dict[str, Any]:
        """See `tokengrove.roll.envs.actions.parse_action`."""
        return parse_action(text, self.action_pattern, self.ACTION_LOOKUP, self.special_token_list)

    def render(self, mode: str | None = None) -> Any:
        """The map: a text with one line for each row, or a picture."""
        mode, room = mode or self.render_mode, self._room()
        check_parameters("sokoban", (), {}, mode, self.render_modes)
        cells = [[room.code((row, column)) for column in range(room.columns)] for row in range(room.rows)]
        if mode != "text":
            return draw(cells, _TILES, self.cell_pixels)
        return "\n".join("".join(self.GRID_LOOKUP.get(code, "?") for code in row) for row in cells)

    @property
    def boxes_on_target(self) -> int:
        return self._room().solved_boxes

    @property
    def player_position(self) -> tuple[int, int]:
        """Row and column, from 0."""
        return self._room().player

    def sample_random_action(self) -> str:
        """A direction, in the form of the default `action_pattern`."""
        return f"<answer>{random.choice([*self.ACTION_LOOKUP.values()])}</answer>"

    def close(self) -> None:
        """End the game; `reset` begins another one."""
        self.room = None

    def _room(self) -> Room:
        if self.room is None:
            raise InvalidRequest("the game has not begun; call reset first")
        return self.room

    def _described(self, chosen: Mapping[str, Any], moved: bool) -> str:
        turn = f"At turn {self.num_env_steps} "
        if chosen["action"] is None:
            return f"{turn}you gave no valid action."
        return turn + (
            f"you moved {chosen['action_content']}." if moved else f"{chosen['action_content']} was blocked."
        )


_CONTENTS = ("wall", "empty", "target", "box on target", "box", "player", "player on target")
_FLOOR, _BOX_COLOUR, _PLAYER = (235, 225, 205), (170, 110, 50), (200, 40, 40)
_TILES = {
    0: Tile((90, 90, 90)),
    1: Tile(_FLOOR),
    2: Tile(_FLOOR, "ring", (40, 160, 60)),
    3: Tile((40, 160, 60), "box", _BOX_COLOUR),
    4: Tile(_FLOOR, "box", _BOX_COLOUR),
    5: Tile(_FLOOR, "disc", _PLAYER),
    6: Tile((40, 160, 60), "disc", _PLAYER),
}
_COLOURS = (
    "In the picture you are the red disc, brown squares are boxes, green rings are targets, walls are grey, and what "
    "stands on a target has a green ground."
)
_PARAMETERS = (
    *("dim_room", "max_steps", "num_boxes", "search_depth", "num_gen_steps", "grid_lookup", "grid_vocab"),
    *(
        "action_lookup",
        "env_instruction",
        "format_penalty",
        "action_pattern",
        "special_token_list",
        "render_mode",
        "cell_pixels",
    ),
)
