"""Rooms for Sokoban, each of which can be solved: it is made by playing backwards from the solution.

A room depends on the generator that it is drawn from and on nothing else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokengrove.errors import InvalidRequest

Cell = tuple[int, int]
"""Row and column, from 0."""

UP, DOWN, LEFT, RIGHT = (-1, 0), (1, 0), (0, -1), (0, 1)
STEPS = (UP, DOWN, LEFT, RIGHT)
_TRIES = 500
_TURNS = 0.35
"""How often the one who digs the room changes direction."""
_PULLS = 0.7
"""How often a box is pulled, where one can be."""


@dataclass(slots=True)
class Room:
    """A room of `rows` times `columns`: floor (targets included), targets, boxes and the player."""

    rows: int
    columns: int
    floor: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: set[Cell]
    player: Cell

    def push(self, step: Cell) -> bool:
        """Move the player by `step`, and the box that is in the way. Return whether anything moved."""
        ahead = _plus(self.player, step)
        if ahead in self.boxes:
            behind = _plus(ahead, step)
            if behind not in self.floor or behind in self.boxes:
                return False
            self.boxes.remove(ahead)
            self.boxes.add(behind)
        elif ahead not in self.floor:
            return False
        self.player = ahead
        return True

    @property
    def solved_boxes(self) -> int:
        """The number of boxes on targets."""
        return len(self.boxes & self.targets)

    def code(self, cell: Cell) -> int:
        """What is in a cell: 0 wall, 1 floor, 2 target, 3 box on target, 4 box, 5 player, 6 player on target."""
        if cell not in self.floor:
            return 0
        target = cell in self.targets
        if cell == self.player:
            return 6 if target else 5
        if cell in self.boxes:
            return 3 if target else 4
        return 2 if target else 1


def generate_room(
    draw: random.Random, dim_room: tuple[int, int], num_boxes: int, search_depth: int, num_gen_steps: int | None = None
) -> Room:
    """Draw a room whose boxes are all off the targets and can all be pushed onto them.

    `dim_room`: rows and columns, walls included. `search_depth`: how many moves are played backwards, the more the
    farther the boxes may be. `num_gen_steps`: how long the room is dug; by default 1.7 times rows and columns together.
    Raises InvalidRequest if no such room is found.
    """
    rows, columns = dim_room
    if min(rows, columns) < 4 or num_boxes < 1:
        raise InvalidRequest(
            f"dim_room is {rows}x{columns} with {num_boxes} boxes; it takes at least 4x4 and one box", param="dim_room"
        )
    digs = int(1.7 * (rows + columns)) if num_gen_steps is None else num_gen_steps
    for _ in range(_TRIES):
        floor = _dug(draw, rows, columns, digs)
        if len(floor) > 2 * num_boxes:
            *targets, player = draw.sample(sorted(floor), num_boxes + 1)
            room = Room(rows, columns, floor, frozenset(targets), set(targets), player)
            if _play_backwards(draw, room, search_depth):
                return room
    raise InvalidRequest(
        f"no room of {rows}x{columns} with {num_boxes} boxes was found; take a larger dim_room, fewer boxes or a "
        "larger search_depth",
        param="num_boxes",
    )


def _dug(draw: random.Random, rows: int, columns: int, digs: int) -> frozenset[Cell]:
    """The floor of a room without walls inside of it that cut it in two: a walk, with a free cell beside each step."""

    def inside(cell: Cell) -> Cell:
        return min(max(cell[0], 1), rows - 2), min(max(cell[1], 1), columns - 2)

    here, step = (draw.randrange(1, rows - 1), draw.randrange(1, columns - 1)), draw.choice(STEPS)
    floor = {here}
    for _ in range(digs):
        if draw.random() < _TURNS:
            step = draw.choice(STEPS)
        here = inside(_plus(here, step))
        floor |= {here, inside(_plus(here, draw.choice(STEPS)))}
    return frozenset(floor)


def _play_backwards(draw: random.Random, room: Room, depth: int) -> bool:
    """Pull the boxes off their targets by `depth` moves; leave the room as it was when they were farthest away.

    Returns whether all boxes are off the targets then.
    """
    homes = {box: box for box in room.boxes}  # where each box is, and its target
    best, kept = (0, 0), None
    for _ in range(depth):
        moves = [(step, pulled) for step in STEPS for pulled in (False, True) if _may_go_back(room, step, pulled)]
        if not moves:
            break
        pulls = [move for move in moves if move[1]]
        step, pulled = draw.choice(pulls if pulls and draw.random() < _PULLS else moves)
        if pulled:
            box = _minus(room.player, step)
            room.boxes.remove(box)
            room.boxes.add(room.player)
            homes[room.player] = homes.pop(box)
        room.player = _plus(room.player, step)
        off = len(room.boxes) - room.solved_boxes
        score = off, sum(abs(box[0] - home[0]) + abs(box[1] - home[1]) for box, home in homes.items())
        if score > best:
            best, kept = score, (set(room.boxes), room.player)
    if kept is None:
        return False
    room.boxes, room.player = kept
    return best[0] == len(room.boxes)


def _may_go_back(room: Room, step: Cell, pulled: bool) -> bool:
    """Whether the player can go back by `step`, and pull the box that is on the other side."""
    ahead = _plus(room.player, step)
    free = ahead in room.floor and ahead not in room.boxes
    return free and (not pulled or _minus(room.player, step) in room.boxes)


def _plus(cell: Cell, step: Cell) -> Cell:
    return cell[0] + step[0], cell[1] + step[1]


def _minus(cell: Cell, step: Cell) -> Cell:
    return cell[0] - step[0], cell[1] - step[1]
