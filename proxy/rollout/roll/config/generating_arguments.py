"""ROLL's `generating_args`, and what they are to our server."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.errors import InvalidRequest

logger = logging.getLogger(__name__)

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
    *("min_tokens", "stop_token_ids"),
)
_WITHOUT_EFFECT = {
    "num_return_sequences": "an episode is one session; group_size says how many are sampled",
    "length_penalty": "it is of beam search only",
    "logprobs": "the logprob of every sampled token is recorded anyway",
    "max_length": "sequence_length limits an episode",
    "include_stop_str_in_output": "samples hold the tokens of a stop string, and the text of an answer ends before it",
}
_said: set[str] = set()


@dataclass
class GeneratingArguments:
    """How answers are sampled, with ROLL's names and defaults; from `min_p` on, further names of our server.

    `max_new_tokens` limits each answer. `do_sample` false is greedy. `top_k` 0 and -1 mean off.
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
    stop_token_ids: list[int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """ROLL's names with their values, as its engines get them: one of max_new_tokens and max_length."""
        values = dataclasses.asdict(self)
        values.pop("max_length" if (self.max_new_tokens or 0) > 0 else "max_new_tokens")
        optional = ("include_stop_str_in_output", "seed", "min_p", "min_tokens", "stop_token_ids")
        for name in (*optional, "presence_penalty", "frequency_penalty"):
            if values[name] is None:
                del values[name]
        return values


def sampling_of(generating_args: Any, path: str = "generating_args") -> dict[str, Any]:
    """What `generating_args` (GeneratingArguments, ROLL's own, or a mapping) are in a session's `sampling`.

    What has no effect here is said once in the log. Raises InvalidRequest for what our engines cannot do, beam search,
    and for a name that is unknown.
    """
    values = _values(generating_args)
    sampling = {name: values.pop(name) for name in _SAMPLING if values.get(name) is not None}
    if values.pop("do_sample", True) is False:
        sampling["temperature"] = 0.0
    if (values.pop("num_beams", 1) or 1) > 1:
        raise InvalidRequest(
            f"{path}.num_beams is more than 1: engines sample token by token; leave it out, and raise group_size",
            param=f"{path}.num_beams",
        )
    if (most := values.pop("max_new_tokens", None)) is not None and most > 0:
        sampling["max_tokens"] = most
    if stop := values.pop("stop_strings", None):
        sampling["stop"] = list(stop)
    defaults = {"num_return_sequences": 1, "length_penalty": 1.0, "logprobs": 0, "max_length": 8192}
    for name, value in values.items():
        if value is not None and value != defaults.get(name):
            _say(name, value, path)
    return sampling


def _values(generating_args: Any) -> dict[str, Any]:
    if isinstance(generating_args, Mapping):
        return dict(generating_args)
    if dataclasses.is_dataclass(generating_args) and not isinstance(generating_args, type):
        return dataclasses.asdict(generating_args)
    return dict(generating_args.to_dict() if hasattr(generating_args, "to_dict") else vars(generating_args))


def _say(name: str, value: Any, path: str) -> None:
    if name not in _WITHOUT_EFFECT:
        if name in _SAMPLING:
            return
        raise InvalidRequest(f"{path}.{name} is nothing that our engines know; leave it out", param=f"{path}.{name}")
    if name not in _said:
        _said.add(name)
        logger.warning("%s.%s=%r has no effect: %s", path, name, value, _WITHOUT_EFFECT[name])
