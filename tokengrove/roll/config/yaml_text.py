"""YAML as OmegaConf reads it: YAML 1.1, but `1e-6` is a number, dates are texts, and duplicate keys are errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tokengrove.errors import InvalidRequest

_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$")
_MAPPING, _MERGE = "tag:yaml.org,2002:map", "tag:yaml.org,2002:merge"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_MOST_VALUES = 1_000_000
"""The maximum number of values of a text. Nested aliases could expand to more values than fit into memory."""


def read_yaml(path: Path) -> Any:
    """The value of a file; None for an empty file. Raises InvalidRequest with the file's name."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the configuration {str(path)!r} cannot be read: {error}") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Any:
    """The value of a YAML text, with a limit for expanded aliases. Raises InvalidRequest; `name` describes the text in
    its message.
    """
    import yaml

    loader = _loader()(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(node, {}) > _MOST_VALUES:
            raise InvalidRequest(f"{name} has more than {_MOST_VALUES} values with its aliases (*name) expanded")
        return loader.construct_document(node)
    except _Circle:
        raise InvalidRequest(f"{name} has an alias (*name) inside its own anchor (&name)") from None
    except RecursionError:
        raise InvalidRequest(f"{name} is not valid YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise InvalidRequest(f"{name} is not valid YAML: {error}") from None
    finally:
        loader.dispose()


class _Circle(Exception):
    """An anchor that contains an alias of itself."""


def _values(node: Any, known: dict[Any, int | None]) -> int:
    """The number of values in a node with aliases expanded. `known`: counts of other nodes; None: not yet complete."""
    if not isinstance(node.value, list):
        return 1
    if node not in known:
        known[node] = None
        parts = (part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,)))
        known[node] = 1 + sum(_values(part, known) for part in parts)
    if (found := known[node]) is None:
        raise _Circle
    return found


@cache
def _loader() -> Any:
    """A SafeLoader with OmegaConf's numbers, without dates, and without duplicate keys."""
    import yaml

    resolvers = {
        first: [(tag, pattern) for tag, pattern in of_first if tag != _TIMESTAMP]
        for first, of_first in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    loader: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": resolvers})
    loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    loader.add_constructor(_MAPPING, _construct_mapping)
    return loader


def _construct_mapping(loader: Any, node: Any) -> Iterator[dict[Any, Any]]:
    """Like SafeLoader's constructor, which yields the mapping before its values are constructed (anchors)."""
    import yaml

    keys = set()
    for key, _ in node.value:
        if not isinstance(key.value, str):
            continue  # a list or a mapping, which the loader rejects
        if key.value in keys and key.tag != _MERGE:
            raise yaml.constructor.ConstructorError(
                "in a mapping", node.start_mark, f"the key {key.value!r} is there twice", key.start_mark
            )
        keys.add(key.value)
    values: dict[Any, Any] = {}
    yield values
    values.update(loader.construct_mapping(node))
