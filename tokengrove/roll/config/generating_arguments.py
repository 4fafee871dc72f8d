"""ROLL's `generating_args`, and their meaning for our server."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokengrove.errors import InvalidRequest

logger = logging.getLogger(__name__)

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "min_tokens": "min_tokens",
    "stop_strings": "stop",
    "include_stop_str_in_output": "include_stop_str_in_output",
}
"""Fields of a session's `sampling`, by the names in generating_args."""
_WITHOUT_EFFECT = {
    "num_return_sequences": (1, "an episode is one session; group_size is the number of samples"),
    "length_penalty": (1.0, "only beam search uses it"),
    "logprobs": (0, "the logprob of every sampled token is recorded anyway"),
    "max_length": (8192, "sequence_length limits an episode"),
}
"""Names without effect: the value that needs no warning, and the reason."""
_said: set[str] = set()


@dataclass
class GeneratingArguments:
    """How answers are sampled, with ROLL's names and defaults; the names from `min_p` on are our server's.

    `max_new_tokens` limits each answer. `do_sample` false means greedy. `top_k` 0 and -1 mean off.
    """

    do_sample: bool | None = True
    temperature: float | None = 0.95
    top_p: float | None = 0.7
    top_k: int | None = 50
    num_beams: int | None = 1
    max_length: int | None = 8192
    max_new_tokens: int | None = 8192
    repetition_penalty: float | None = 1.0
    length_penalty: float | None = 1.0
    num_return_sequences: int | None = 1
    stop_strings: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    logprobs: int | None = 0
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """ROLL's names with their values, as its engines receive them: with either max_new_tokens or max_length."""
        values = dataclasses.asdict(self)
        values.pop("max_length" if (self.max_new_tokens or 0) > 0 else "max_new_tokens")
        optional = (
            "include_stop_str_in_output",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "min_tokens",
        )
        return {name: value for name, value in values.items() if value is not None or name not in optional}


def sampling_of(generating_args: Any, max_tokens_per_step: int | None = None) -> dict[str, Any]:
    """A session's `sampling` for `generating_args` (GeneratingArguments, ROLL's own, a mapping or None).

    `max_tokens` is the smaller of `max_new_tokens` and `max_tokens_per_step`. Names without effect are logged once.
    Raises InvalidRequest for beam search, which our engines do not support, and for an unknown name.
    """
    given = {name: value for name, value in _values(generating_args).items() if value is not None}
    greedy = given.pop("do_sample", True) is False
    if (beams := given.pop("num_beams", 1)) > 1:
        raise InvalidRequest(
            f"generating_args.num_beams is {beams}, but rollouts are sampled: leave it out, and raise group_size",
            param="generating_args.num_beams",
        )
    bounds = [most for most in (given.pop("max_new_tokens", None), max_tokens_per_step) if most and most > 0]
    sampling = {_SAMPLING[name]: value for name, value in given.items() if name in _SAMPLING and value != []}
    for name in given.keys() - _SAMPLING.keys():
        _say(name, given[name])
    return {**sampling, **({"temperature": 0.0} if greedy else {}), **({"max_tokens": min(bounds)} if bounds else {})}


def _values(generating_args: Any) -> Mapping[str, Any]:
    if generating_args is None or isinstance(generating_args, Mapping):
        return generating_args or {}
    if dataclasses.is_dataclass(generating_args) and not isinstance(generating_args, type):
        return {field.name: getattr(generating_args, field.name) for field in dataclasses.fields(generating_args)}
    found: Mapping[str, Any] = (
        generating_args.to_dict() if hasattr(generating_args, "to_dict") else vars(generating_args)
    )
    return found


def _say(name: str, value: Any) -> None:
    if name not in _WITHOUT_EFFECT:
        raise InvalidRequest(
            f"generating_args.{name} is unknown to our engines; leave it out", param=f"generating_args.{name}"
        )
    quiet, why = _WITHOUT_EFFECT[name]
    if value != quiet and name not in _said:
        _said.add(name)
        logger.warning("generating_args.%s=%r has no effect: %s", name, value, why)
