"""Agent loops by name: registered in code, listed in a YAML file, or given by their class."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tokengrove.errors import InvalidRequest, how_to_get
from tokengrove.rollout.config import Config
from tokengrove.rollout.imports import load

_T = TypeVar("_T", bound=type)

_HYDRAS = frozenset({"_target_", "_args_", "_partial_", "_recursive_", "_convert_"})

_agent_loop_registry: dict[str, dict[str, Any]] = {}


def register(agent_name: str) -> Callable[[_T], _T]:
    """Register the decorated class under a name, the `agent_name` of samples. A later registration replaces it."""

    def decorator(loop: _T) -> _T:
        _agent_loop_registry[agent_name] = {"_target_": loop}
        return loop

    return decorator


def resolve(agent: str | type) -> tuple[type, dict[str, Any]]:
    """The class of an agent loop, and the keyword arguments of its entry in the YAML file.

    `agent`: a registered name, `package.module.Class`, `package.module:Class`, or a class. Raises InvalidRequest for
    other values, with the registered names.
    """
    if isinstance(agent, type):
        return agent, {}
    entry = _agent_loop_registry.get(agent)
    if entry is None:
        if "." not in agent and ":" not in agent:
            known = ", ".join(sorted(_agent_loop_registry))
            raise InvalidRequest(f"agent loop {agent!r} is not registered; known are {known}", param="agent_name")
        entry = {"_target_": agent}
    target = entry["_target_"]
    found = load(target) if isinstance(target, str) else target
    if not isinstance(found, type):
        raise InvalidRequest(f"agent loop {agent!r}: {target!r} is not a class", param="agent_name")
    return found, {name: value for name, value in entry.items() if name not in ("_target_", "name")}


def register_file(path: str | os.PathLike[str]) -> None:
    """Register the loops of a YAML file: a list of `name`, `_target_` (the import path of a class) and arguments.

    Interpolations are those of `Config`. Raises InvalidRequest for a missing or invalid file, and for features of
    hydra: other names with underscores, and a `_target_` inside an argument.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise InvalidRequest(f"agent_loop_config_path needs pyyaml: {how_to_get('pyyaml')}") from None
    try:
        listed = Config({"loops": yaml.safe_load(Path(path).read_text(encoding="utf-8"))}).to_dict()["loops"]
    except (OSError, yaml.YAMLError) as error:
        raise InvalidRequest(f"agent_loop_config_path: {error}", param="agent_loop_config_path") from None
    except RecursionError:
        raise InvalidRequest(f"{path} is nested too deeply", param="agent_loop_config_path") from None
    if not isinstance(listed, list) or not all(map(_is_entry, listed)):
        message = f"{path}: write a list whose entries have the texts 'name' and '_target_'"
        raise InvalidRequest(message, param="agent_loop_config_path")
    for entry in listed:
        for name in _of_hydra({**entry, "_target_": None}):
            message = f"{path}: {name!r} of {entry['name']!r} needs hydra; create the object in the loop's __init__"
            raise InvalidRequest(message, param="agent_loop_config_path")
        _agent_loop_registry[entry["name"]] = entry


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(isinstance(entry.get(name), str) for name in ("name", "_target_"))


def _of_hydra(value: Any) -> Iterator[str]:
    """The names in a value, at any depth, that only hydra supports."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name in _HYDRAS and inner is not None:
                yield name
            yield from _of_hydra(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _of_hydra(inner)
