"""The frozen lake as text or pictures: ROLL's `frozen_lake`.

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

_RULES = (
    "You cross a frozen lake. Reach the goal and keep out of the holes. Where the ice is slippery, you may slide to "
    "the side of where you wanted to go. Give one action in each turn, in the form <answer>Right</answer>."
)
_STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""The steps of 0 left, 1 down, 2 right, 3 up. The neighbours of a step in this order are at right angles to it."""


class FrozenLakeEnv(Env):  # type: ignore[misc]
    """A lake with holes. An observation is its map as text, an action a text with the name of a direction.

    With `render_mode` `rgb_array` an observation is a picture, uint8 [height, width, 3], with cells of `cell_pixels` x
    `cell_pixels` pixels.

    `size`: rows and columns. `p`: the probability that a cell is frozen. `is_slippery`: each move goes in its direction
    or to either side, with a probability of a third each. `map_seed`: the seed of a reset without a seed. `max_steps`:
    the number of steps after which the episode is over (`terminated` and `truncated`). `grid_lookup`: the signs of 0
    player, 1 frozen, 2 hole, 3 goal, 4 player in hole, 5 player on goal; `grid_vocab`: the meanings of the signs.
    `map_lookup`: the numbers of P (player), F, H and G. `action_lookup`: the names of 0 left, 1 down, 2 right, 3 up.
    `env_instruction`: replaces the rules. `action_pattern`, `special_token_list`: see `parse_action`. The goal earns 1,
    and a step without a valid action `format_penalty`. Raises InvalidRequest for unknown parameters.
    """

    render_modes: ClassVar[Sequence[str]] = RENDER_MODES

    def __init__(
        self,
        render_mode: str = "text",
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = True,
        map_seed: int | None = None,
        max_steps: int = 20,
        grid_lookup: Mapping[Any, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        map_lookup: Mapping[Any, int] | None = None,
        action_lookup: Mapping[Any, str] | None = None,
        env_instruction: str | None = None,
        format_penalty: float = 0.0,
        action_pattern: str = "<answer>(.*?)</answer>",
        special_token_list: Sequence[str] | None = ("<|im_start|>", "<|im_end|>"),
        cell_pixels: int = 32,
        **others: Any,
    ) -> None:
        check_parameters("frozen_lake", _PARAMETERS, others, render_mode, self.render_modes)
        self.cell_pixels = size_of_cells(cell_pixels)
        self.size, self.p, self.is_slippery, self.map_seed = size, p, is_slippery, map_seed
        self.max_steps = max_steps
        self.GRID_LOOKUP = by_number(grid_lookup or dict(enumerate("P_OGX√")))
        self.GRID_VOCAB = dict(grid_vocab or dict(zip(self.GRID_LOOKUP.values(), _CONTENTS, strict=False)))
        given = map_lookup or {"P": 0, FROZEN: 1, HOLE: 2, GOAL: 3}
        self.MAP_LOOKUP = {sign.decode() if isinstance(sign, bytes) else sign: code for sign, code in given.items()}
        self.ACTION_LOOKUP = by_number(action_lookup or {0: "Left", 1: "Down", 2: "Right", 3: "Up"})
        if not set(self.ACTION_LOOKUP) <= {0, 1, 2, 3}:
            raise InvalidRequest("action_lookup names 0 left, 1 down, 2 right and 3 up", param="action_lookup")
        self.env_instruction = env_instruction or _RULES
        self.format_penalty, self.action_pattern = format_penalty, action_pattern
        self.special_token_list, self.render_mode = special_token_list, render_mode
        self.step_count = 0
        self.lake: list[str] = []
        self.player_pos: Cell = (0, 0)
        self._draw = random.Random()

    def get_instructions(self) -> str:
        """The rules, the signs of the map (for pictures, a description) and the actions."""
        is_text = self.render_mode == "text"
        told = self.env_instruction if is_text or self.env_instruction != _RULES else f"{_RULES} {_COLOURS}"
        return instructions(told, self.GRID_VOCAB if is_text else {}, self.ACTION_LOOKUP)

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the game of `seed`; by default of `map_seed`, or a random game. `info` has `env_instruction`."""
        self._draw = random.Random(self.map_seed if seed is None else seed)
        self.lake = generate_map(self._draw, self.size, self.p)
        self.player_pos, self.step_count = find(self.lake, START), 0
        return self.render(), {"env_instruction": self.get_instructions()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move by `action`. A step without a valid action counts, and moves nothing."""
        if not self.lake:
            raise InvalidRequest("the game has not begun; call reset first")
        self.step_count += 1
        chosen = self.parse_action(text_of(action))
        moved = chosen["action"] is not None and self._move(chosen["action"])
        here = self._here()
        penalty = self.format_penalty if chosen["action"] is None else 0.0
        ended = here in (GOAL, HOLE)
        truncated = not ended and self.step_count >= self.max_steps
        info = {
            "metrics": {
                "action_is_effective": moved,
                "action_is_valid": chosen["action"] is not None,
                "success": here == GOAL,
                "format_penalty": penalty,
            },
            "metrics_agg_mode": dict(METRICS_AGG_MODE),
            "action_desc": self._described(chosen, moved),
            **chosen,
        }
        return self.render(), penalty + (moved and here == GOAL), ended or truncated, truncated, info

    def parse_action(self, text: str) -> dict[str, Any]:
        """See `tokengrove.roll.envs.actions.parse_action`."""
        return parse_action(text, self.action_pattern, self.ACTION_LOOKUP, self.special_token_list)

    def render(self, mode: str | None = None) -> Any:
        """The map: a text with one line for each row, or a picture."""
        mode = mode or self.render_mode
        check_parameters("frozen_lake", (), {}, mode, self.render_modes)
        cells = [[self._code((row, column)) for column in range(self.size)] for row in range(self.size)]
        if mode != "text":
            return draw(cells, _TILES, self.cell_pixels)
        return "\n".join("".join(self.GRID_LOOKUP.get(code, "?") for code in row) for row in cells)

    def sample_random_action(self) -> str:
        """A direction, in the form of the default `action_pattern`."""
        return f"<answer>{random.choice([*self.ACTION_LOOKUP.values()])}</answer>"

    def close(self) -> None:
        """End the game; `reset` begins another one."""
        self.lake = []

    def _move(self, number: int) -> bool:
        """Move or slide; return whether the position changed. A player in a hole or on the goal does not move."""
        if self._here() in (GOAL, HOLE):
            return False
        if self.is_slippery:
            number = (number + self._draw.choice((-1, 0, 1))) % len(_STEPS)
        (row, column), before = _STEPS[number], self.player_pos
        self.player_pos = self._inside(before[0] + row), self._inside(before[1] + column)
        return self.player_pos != before

    def _inside(self, at: int) -> int:
        return min(max(at, 0), self.size - 1)

    def _here(self) -> str:
        return self.lake[self.player_pos[0]][self.player_pos[1]]

    def _code(self, cell: Cell) -> int:
        sign = self.lake[cell[0]][cell[1]]
        if cell == self.player_pos:
            return {HOLE: 4, GOAL: 5}.get(sign, self.MAP_LOOKUP["P"])
        return self.MAP_LOOKUP[FROZEN if sign == START else sign]

    def _described(self, chosen: Mapping[str, Any], moved: bool) -> str:
        turn = f"At turn {self.step_count} "
        if chosen["action"] is None:
            return f"{turn}you gave no valid action."
        wanted = chosen["action_content"]
        return turn + (f"you wanted to go {wanted}, and moved." if moved else f"{wanted} moved you nowhere.")


_CONTENTS = ("player", "empty", "hole", "goal", "player in hole", "player on goal")
_ICE = (215, 235, 245)
_TILES = {
    0: Tile(_ICE, "disc", (200, 40, 40)),
    1: Tile(_ICE),
    2: Tile(_ICE, "box", (25, 45, 100)),
    3: Tile(_ICE, "box", (40, 160, 60)),
    4: Tile((25, 45, 100), "disc", (200, 40, 40)),
    5: Tile((40, 160, 60), "disc", (200, 40, 40)),
}
_COLOURS = "In the picture you are the red disc, the dark blue squares are holes, and the green square is the goal."
_PARAMETERS = (
    *("size", "p", "is_slippery", "map_seed", "max_steps", "grid_lookup", "grid_vocab", "map_lookup", "action_lookup"),
    *("env_instruction", "format_penalty", "action_pattern", "special_token_list", "render_mode", "cell_pixels"),
)


Cell = tuple[int, int]
"""Row and column, from 0."""

START, FROZEN, HOLE, GOAL = "S", "F", "H", "G"
_TRIES = 10_000


def generate_map(draw: random.Random, size: int, p: float) -> list[str]:
    """Draw a map of `size` rows of S (start), F (frozen), H (hole) and G (goal); a cell is frozen with probability `p`.

    Start and goal are random. Raises InvalidRequest if no map with a path between them is found.
    """
    if size < 2:
        raise InvalidRequest(f"size is {size}; a lake has at least two rows", param="size")
    for _ in range(_TRIES):
        rows = [[FROZEN if draw.random() < p else HOLE for _ in range(size)] for _ in range(size)]
        start, goal = draw.sample([(row, column) for row in range(size) for column in range(size)], 2)
        rows[start[0]][start[1]], rows[goal[0]][goal[1]] = START, GOAL
        lake = ["".join(row) for row in rows]
        if _connected(lake, start, goal):
            return lake
    raise InvalidRequest(f"no map of size {size} with p={p} has a path to the goal; take a larger p", param="p")


def find(lake: list[str], sign: str) -> Cell:
    """The cell of a sign that the map has once."""
    return next((row, line.index(sign)) for row, line in enumerate(lake) if sign in line)


def _connected(lake: list[str], start: Cell, goal: Cell) -> bool:
    seen, open_cells = {start}, [start]
    while open_cells:
        row, column = open_cells.pop()
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            inside = 0 <= cell[0] < len(lake) and 0 <= cell[1] < len(lake)
            if inside and cell not in seen and lake[cell[0]][cell[1]] != HOLE:
                seen.add(cell)
                open_cells.append(cell)
    return goal in seen
