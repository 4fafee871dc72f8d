"""The options of an export as query parameters: those that decide what becomes of a token.

Names and values are those of an export's body. Values that are no text (`train`, `prompt_length` ...) are JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.api.export_options import parse_options
from proxy.api.export_request import SAMPLE_FILTERS
from proxy.api.known_fields import check_known
from proxy.protocols.fields import optional_object
from proxy.trajectory.layout_options import LayoutOptions
from tokengrove.errors import InvalidRequest

_WORDS = ("layout", "drift", "unrewarded", "reward_name", "reward_granularity", "reward_scope", "on_too_long", "keep")
_VALUES = ("train", "mask_unfinished", "prompt_length", "response_length", "filter")
TOKEN_OPTIONS = (*_WORDS, *_VALUES)


def parse_token_options(query: Mapping[str, str]) -> LayoutOptions:
    """The options in a query. Raises InvalidRequest that names the parameter and the allowed values."""
    body: dict[str, Any] = {name: query[name] for name in _WORDS if name in query}
    body |= {name: _json(query[name], name) for name in _VALUES if name in query}
    filters = optional_object(body, "filter")
    check_known(filters, SAMPLE_FILTERS, "filter.")
    return parse_options(body, filters)


def _json(text: str, name: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise InvalidRequest(f"'{name}' must be JSON, as in the body of an export", param=name) from None
