"""Replies as objects of the package openai, or with the same attributes if it is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

Json = Any


class Reply(SimpleNamespace):
    """An object with the attributes of OpenAI's types; `model_dump` returns its JSON."""

    def model_dump(self) -> dict[str, Json]:
        """The fields as dicts and lists."""
        dumped: dict[str, Json] = _dumped(self)
        return dumped


def chat_completion(reply: Mapping[str, Json]) -> Any:
    """The body of a chat completion as OpenAI's `ChatCompletion`, or a `Reply`."""
    try:
        from openai.types.chat import ChatCompletion
    except ModuleNotFoundError:
        return _shaped(reply)
    return ChatCompletion.construct(**reply)


def response(reply: Mapping[str, Json]) -> Any:
    """The body of a response as OpenAI's `Response`, or a `Reply`."""
    try:
        from openai.types.responses import Response
    except ModuleNotFoundError:
        return _shaped(reply)
    return Response.construct(**reply)


def _shaped(value: Json) -> Any:
    if isinstance(value, Mapping):
        return Reply(**{name: _shaped(of) for name, of in value.items()})
    return [_shaped(item) for item in value] if isinstance(value, list) else value


def _dumped(value: Any) -> Json:
    if isinstance(value, Reply):
        return {name: _dumped(of) for name, of in vars(value).items()}
    return [_dumped(item) for item in value] if isinstance(value, list) else value
