"""Parses sampling fields of a request into fields of `SamplingParams`; a field that was not given is left out.

Fields of the OpenAI API have its ranges; other fields have ranges that every engine accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.errors import InvalidRequest
from proxy.protocols.fields import expect_list, expect_object, expect_str, optional_float, optional_int

_MAX_STOP_STRINGS = 16
# No vocabulary has longer ids, and Python's int() refuses numbers of more than 4300 digits.
_MAX_TOKEN_DIGITS = 9


def parse_sampling(body: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return the fields of SamplingParams that `body` sets. Raises InvalidRequest; `at` prefixes the field it names."""
    return {
        **parse_sampling_numbers(body, at),
        **_given(logit_bias=_parse_logit_bias(body.get("logit_bias"), at), stop=_parse_stop(body.get("stop"), at)),
    }


def parse_sampling_numbers(body: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return only the numeric fields, which a session may set as defaults of its turns."""
    return _given(
        temperature=optional_float(body, "temperature", least=0.0, most=100.0, at=at),
        top_p=optional_float(body, "top_p", least=0.0, most=1.0, at=at),
        min_p=optional_float(body, "min_p", least=0.0, most=1.0, at=at),
        top_k=optional_int(body, "top_k", least=-1, at=at),
        presence_penalty=optional_float(body, "presence_penalty", least=-2.0, most=2.0, at=at),
        frequency_penalty=optional_float(body, "frequency_penalty", least=-2.0, most=2.0, at=at),
        repetition_penalty=optional_float(body, "repetition_penalty", least=0.01, most=100.0, at=at),
        seed=optional_int(body, "seed", least=-(2**63), most=2**63 - 1, at=at),
        max_tokens=_parse_max_tokens(body, at),
    )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _parse_max_tokens(body: Mapping[str, Any], at: str) -> int | None:
    limits = [optional_int(body, name, least=1, at=at) for name in ("max_completion_tokens", "max_tokens")]
    return min((limit for limit in limits if limit is not None), default=None)


def _parse_stop(value: Any, at: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    name = f"{at}stop"
    strings = [value] if isinstance(value, str) else expect_list(value, name)
    if len(strings) > _MAX_STOP_STRINGS:
        message = f"'{name}' has {len(strings)} strings; at most {_MAX_STOP_STRINGS} are allowed"
        raise InvalidRequest(message, param=name)
    stop = tuple(expect_str(item, f"{name}[{index}]") for index, item in enumerate(strings))
    if "" in stop:
        raise InvalidRequest(f"'{name}' must not hold an empty string", param=name)
    return stop


def _parse_logit_bias(value: Any, at: str) -> tuple[tuple[int, float], ...] | None:
    if value is None:
        return None
    name = f"{at}logit_bias"
    return tuple(sorted(_bias_entry(token, bias, name) for token, bias in expect_object(value, name).items()))


def _bias_entry(token: str, bias: Any, name: str) -> tuple[int, float]:
    if not (token.isascii() and token.isdigit()) or len(token) > _MAX_TOKEN_DIGITS:
        raise InvalidRequest(f"'{name}' has the key {token[:40]!r}; keys must be token ids", param=name)
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
        raise InvalidRequest(f"'{name}.{token}' must be a number between -100 and 100", param=name)
    return int(token), float(bias)
