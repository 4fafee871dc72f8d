"""Maps of frozen lakes, each with a path from the start to the goal. A map depends on its random generator only."""

from __future__ import annotations

import random

from tokengrove.errors import InvalidRequest

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
