"""The fields of a request that change which distribution vLLM's logprobs are of, one by one and in pairs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any


@dataclass
class Field:
    """A field of a request: what it sets in the sampling, or something else about the request."""

    sampling: dict[str, Any]
    grammar: bool = False
    stream: bool = False


FIELDS = {
    "temperature": Field({"temperature": 0.7}),
    "temperature 0": Field({"temperature": 0.0}),
    "top_p": Field({"top_p": 0.6}),
    "top_k": Field({"top_k": 5}),
    "min_p": Field({"min_p": 0.2}),
    "presence_penalty": Field({"presence_penalty": 1.5}),
    "frequency_penalty": Field({"frequency_penalty": 0.8}),
    "repetition_penalty": Field({"repetition_penalty": 1.4}),
    "logit_bias": Field({"logit_bias": ((77, 4.0), (500, -5.0))}),
    "grammar": Field({}, grammar=True),
    "stream": Field({}, stream=True),
}

CASES = [
    *((name,) for name in FIELDS),
    *(pair for pair in itertools.combinations(FIELDS, 2) if pair != ("temperature", "temperature 0")),
]
