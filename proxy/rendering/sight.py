"""The images that a model accepts, for people and clients."""

from __future__ import annotations

from typing import NamedTuple

EXAMPLE = (1024, 768)
"""Width and height of the example image, in pixels."""


class Sight(NamedTuple):
    """`processor`: its class. `roles`: roles whose messages may have images. `example_tokens`: those of EXAMPLE."""

    processor: str
    roles: tuple[str, ...]
    example_tokens: int

    def __str__(self) -> str:
        width, height = EXAMPLE
        where = f"in messages of {', '.join(self.roles)}" if self.roles else "in no message: the chat template has none"
        return f"{where}; {width} x {height} pixels take {self.example_tokens} tokens"
