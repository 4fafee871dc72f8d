"""The format that a request demands of its answer: at most one, and never ignored.

OpenAI's `response_format` (`text.format`), vLLM's `structured_outputs`, SGLang's `regex` and `ebnf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.protocols.fields import expect_bool, expect_list, expect_object, expect_text, json_type, optional_bool
from proxy.types import ResponseFormat
from tokengrove.errors import InvalidRequest, UnsupportedParameter, brief

FORMAT_FIELDS = frozenset({"structured_outputs", "regex", "ebnf"})
"""The fields that `parse_answer_format` reads."""

_FORMER = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}

FORMER_FIELDS = frozenset({*_FORMER, "guided_decoding_backend", "guided_whitespace_pattern"})
"""vLLM's fields before `structured_outputs`. `parse_answer_format` refuses them."""

_AT = "structured_outputs"
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_UNSUPPORTED = ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def parse_answer_format(body: Mapping[str, Any], other: ResponseFormat | None = None) -> ResponseFormat | None:
    """Return the format of `structured_outputs`, `regex` or `ebnf`, else `other`, which another field demands."""
    _refuse_former(body)
    formats = [] if other is None else [other]
    if body.get(_AT) is not None:
        formats.append(_parse_structured(expect_object(body[_AT], _AT)))
    if body.get("regex") is not None:
        formats.append(ResponseFormat(regex=expect_text(body["regex"], "regex"), param="regex"))
    if body.get("ebnf") is not None:
        formats.append(_parse_ebnf(body["ebnf"], "ebnf"))
    if len(formats) > 1:
        first, second = formats[0].param, formats[1].param
        raise InvalidRequest(f"'{first}' and '{second}' exclude each other; give one of them", param=second)
    return formats[0] if formats else None


def parse_response_format(value: Any, name: str) -> ResponseFormat | None:
    """Parse an OpenAI response format found at the path `name`; None means plain text.

    The schema may be in `json_schema` (chat) or next to `type` (responses).
    """
    if value is None:
        return None
    wanted = expect_object(value, name)
    match wanted.get("type"):
        case "text":
            return None
        case "json_object":
            return ResponseFormat(param=name)
        case "json_schema":
            holder = expect_object(wanted.get("json_schema", wanted), f"{name}.json_schema")
            strict = holder.get("strict")
            return ResponseFormat(
                expect_object(holder.get("schema"), f"{name}.json_schema.schema"),
                param=name,
                strict=None if strict is None else expect_bool(strict, f"{name}.json_schema.strict"),
            )
        case kind:
            message = f"'{name}.type' must be text, json_object or json_schema, not {brief(kind)}"
            raise InvalidRequest(message, param=f"{name}.type")


def format_fields(wanted: ResponseFormat) -> dict[str, Any]:
    """Return the field of a chat completion that demands a format."""
    fields = {"regex": wanted.regex, "grammar": wanted.ebnf, "choice": list(wanted.choices) or None}
    if structured := {name: value for name, value in fields.items() if value is not None}:
        return {_AT: structured}
    if wanted.schema is None:
        return {"response_format": {"type": "json_object"}}
    named: dict[str, Any] = {"name": "answer", "schema": wanted.schema}
    if wanted.strict is not None:
        named["strict"] = wanted.strict
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _refuse_former(body: Mapping[str, Any]) -> None:
    for name in sorted(FORMER_FIELDS & body.keys()):
        if body[name] is not None:
            instead = f"give '{_AT}': {{'{_FORMER[name]}': ...}}" if name in _FORMER else "leave it out"
            raise UnsupportedParameter(f"'{name}' is not supported, vLLM has removed it; {instead}", param=name)


def _parse_structured(wanted: Mapping[str, Any]) -> ResponseFormat:
    """Parse vLLM's `structured_outputs`, which has exactly one kind of format."""
    for name in sorted(wanted.keys() - {*_KINDS}):
        if name not in _UNSUPPORTED:
            message = f"'{_AT}.{name}' is unknown; the fields are {', '.join(_KINDS)}"
            raise InvalidRequest(message, param=f"{_AT}.{name}")
        if wanted[name]:
            message = f"'{_AT}.{name}' is not supported; leave it out"
            raise UnsupportedParameter(message, param=f"{_AT}.{name}")
    kinds = [name for name in _KINDS if wanted.get(name) is not None]
    if len(kinds) != 1:
        given = " and ".join(kinds) or "none"
        raise InvalidRequest(f"'{_AT}' needs exactly one of {', '.join(_KINDS)}, not {given}", param=_AT)
    (kind,) = kinds
    at, value = f"{_AT}.{kind}", wanted[kind]
    match kind:
        case "json":
            return ResponseFormat(_parse_schema(value, at), param=at)
        case "regex":
            return ResponseFormat(regex=expect_text(value, at), param=at)
        case "choice":
            return ResponseFormat(choices=_parse_choices(value, at), param=at)
        case "grammar":
            return _parse_ebnf(value, at)
    if not optional_bool(wanted, kind, at=f"{_AT}."):
        raise InvalidRequest(f"'{at}' must be true; leave '{_AT}' out for plain text", param=at)
    return ResponseFormat(param=at)


def _parse_schema(value: Any, at: str) -> Mapping[str, Any]:
    """Return a JSON schema, which may be a JSON text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except ValueError as error:
            raise InvalidRequest(f"'{at}' is not a JSON text: {error}", param=at) from None
    return expect_object(value, at)


def _parse_choices(value: Any, at: str) -> tuple[str, ...]:
    choices = tuple(expect_text(item, f"{at}[{index}]") for index, item in enumerate(expect_list(value, at)))
    if not all(choices) or not choices:
        raise InvalidRequest(f"'{at}' must have at least one text, and no empty one", param=at)
    return choices


def _parse_ebnf(value: Any, at: str) -> ResponseFormat:
    """Return a grammar in the EBNF of xgrammar and llama.cpp (GBNF), whose first rule is `root`."""
    if not isinstance(value, str):
        raise InvalidRequest(f"'{at}' must be a string, not {json_type(value)}", param=at)
    if "::=" not in value:
        message = f'\'{at}\' must be in EBNF, as in `root ::= "yes" | "no"`; other notations (Lark) are not supported'
        raise UnsupportedParameter(message, param=at)
    return ResponseFormat(ebnf=expect_text(value, at), param=at)
