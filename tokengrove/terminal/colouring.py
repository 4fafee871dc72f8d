"""The ways to colour tokens. The import is light, because the help of a command needs it but not the drawing code."""

from __future__ import annotations

from typing import Literal

By = Literal["mask", "logprob", "version"]
