"""Request fields that several APIs share: `model` and the reasoning effort; ignored fields."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from proxy.protocols.fields import expect_bool, expect_object, optional_text


def parse_model(body: Mapping[str, Any]) -> str:
    """Return `model`, which the reply repeats, or "" without one: the endpoint then uses the served name."""
    model = body.get("model")
    return model if type(model) is str and "\0" not in model else optional_text(body, "model") or ""


def ignored_fields(value: Mapping[str, Any], honoured: AbstractSet[str]) -> list[str]:
    """Return the fields of `value` that are not honoured, sorted. Null fields do not count: clients send defaults."""
    return sorted(name for name in value.keys() - honoured if value[name] is not None)


def parse_include_usage(body: Mapping[str, Any]) -> bool:
    """Return `stream_options.include_usage`."""
    options = body.get("stream_options")
    if options is None:
        return False
    value = expect_object(options, "stream_options").get("include_usage")
    return False if value is None else expect_bool(value, "stream_options.include_usage")


def effort_options(effort: str) -> dict[str, Any]:
    """Return the chat template options for a reasoning effort.

    Some templates read `reasoning_effort`; more read `enable_thinking`, which the effort "none" disables.
    """
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
