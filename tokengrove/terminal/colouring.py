"""What tokens may be coloured by. Light to import: the help of a command names it without loading what draws."""

from __future__ import annotations

from typing import Literal

By = Literal["mask", "logprob", "version"]
