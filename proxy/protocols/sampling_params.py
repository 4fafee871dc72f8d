"""Parses the sampling fields of a request into fields of `SamplingParams`, and writes them. Unset fields are left out.

Fields of the OpenAI API have OpenAI's ranges; other fields have ranges that every engine accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from proxy.protocols.fields import (
    expect_bool,
    expect_list,
    expect_object,
    expect_text,
    optional_float,
    optional_int,
    parse_token_ids,
)
from proxy.types import SamplingParams
from tokengrove.errors import InvalidRequest, brief

_NUMBERS: tuple[tuple[str, Callable[..., float | None], float, float], ...] = (
    ("temperature", optional_float, 0.0, 100.0),
    ("top_p", optional_float, 0.0, 1.0),
    ("min_p", optional_float, 0.0, 1.0),
    ("top_k", optional_int, -1, 2**31 - 1),
    ("presence_penalty", optional_float, -2.0, 2.0),
    ("frequency_penalty", optional_float, -2.0, 2.0),
    ("repetition_penalty", optional_float, 0.01, 100.0),
    ("seed", optional_int, -(2**63), 2**63 - 1),
    ("max_completion_tokens", optional_int, 1, 2**31 - 1),
    ("max_tokens", optional_int, 1, 2**31 - 1),
    ("min_tokens", optional_int, 0, 2**31 - 1),
)
NUMBERS = frozenset(name for name, *_ in _NUMBERS)
"""The names of the numeric fields."""
_INCLUDE_STOP = "include_stop_str_in_output"
_MAX_STOP_STRINGS = 16
_MAX_STOP_TOKENS = 64
# No vocabulary has longer ids, and Python's int() refuses numbers of more than 4300 digits.
_MAX_TOKEN_DIGITS = 9


def parse_sampling(body: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return the fields of SamplingParams that `body` sets. Raises InvalidRequest; `at` prefixes the field's path."""
    given = parse_sampling_numbers(body, at)
    if (bias := body.get("logit_bias")) is not None:
        given["logit_bias"] = _parse_logit_bias(bias, at)
    if (stop := body.get("stop")) is not None:
        given["stop"] = parse_stop(stop, at)
    if (shown := body.get(_INCLUDE_STOP)) is not None:
        given[_INCLUDE_STOP] = expect_bool(shown, f"{at}{_INCLUDE_STOP}")
    if body.get("stop_token_ids") is not None:
        given["stop_token_ids"] = parse_stop_tokens(body["stop_token_ids"], at)
    return given


def parse_stop_tokens(value: Any, at: str = "") -> tuple[int, ...]:
    """Parse `stop_token_ids`, which may be empty."""
    name = f"{at}stop_token_ids"
    values = expect_list(value, name)
    if len(values) > _MAX_STOP_TOKENS:
        raise InvalidRequest(f"'{name}' has {len(values)} ids; at most {_MAX_STOP_TOKENS} are allowed", param=name)
    return tuple(parse_token_ids(values, name)) if values else ()


def parse_sampling_numbers(body: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return only the numeric fields."""
    given: dict[str, Any] = {}
    for name, parse, least, most in _NUMBERS:
        if body.get(name) is not None:
            given[name] = parse(body, name, least=least, most=most, at=at)
    if (limit := given.pop("max_completion_tokens", None)) is not None:
        given["max_tokens"] = min(limit, given.get("max_tokens", limit))
    return given


def parse_stop(value: Any, at: str = "") -> tuple[str, ...]:
    """Parse `stop`: a text or several."""
    name = f"{at}stop"
    strings = [value] if isinstance(value, str) else expect_list(value, name)
    if len(strings) > _MAX_STOP_STRINGS:
        message = f"'{name}' has {len(strings)} strings; at most {_MAX_STOP_STRINGS} are allowed"
        raise InvalidRequest(message, param=name)
    stop = tuple(expect_text(item, f"{name}[{index}]") for index, item in enumerate(strings))
    if "" in stop:
        raise InvalidRequest(f"'{name}' must not hold an empty string", param=name)
    return stop


def _parse_logit_bias(value: Any, at: str) -> tuple[tuple[int, float], ...]:
    name = f"{at}logit_bias"
    return tuple(sorted(_bias_entry(token, bias, name) for token, bias in expect_object(value, name).items()))


def _bias_entry(token: str, bias: Any, name: str) -> tuple[int, float]:
    if not (token.isascii() and token.isdigit()) or len(token) > _MAX_TOKEN_DIGITS:
        raise InvalidRequest(f"'{name}' has the key {brief(token)}; keys must be token ids", param=name)
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
        raise InvalidRequest(f"'{name}.{token}' must be a number between -100 and 100", param=name)
    return int(token), float(bias)


def sampling_json(sampling: SamplingParams, also: AbstractSet[str] = frozenset()) -> dict[str, Any]:
    """Return the fields from which `parse_sampling` makes `sampling`: those without default values, and `also`."""
    shown = sampling.to_json() | {name: getattr(sampling, name) for name in also & set(SamplingParams._fields)}
    if "logit_bias" in shown:
        shown["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in shown.items() if value is not None
    }
