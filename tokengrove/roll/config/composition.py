"""Puts a configuration together from the files that its `defaults` list names, by hydra's rules.

A file is a mapping. Its `defaults` list names other files, which are merged in order into the file's own package (the
place in the configuration at which it stands); its own settings stand where the list has `_self_`, else last, so that
they win. The section `hydra` is hydra's own and is left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.config.yaml_text import read_yaml

logger = logging.getLogger(__name__)

_HEADER = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_OF_TRAINING = "deepspeed_"
"""Files of such names hold settings of DeepSpeed only, and ROLL has stopped shipping them: they may be missing."""


@dataclass(frozen=True)
class _Entry:
    """A file that a `defaults` list names, and where it belongs, if the list says so."""

    file: str
    package: str | None
    optional: bool = False


class Composition:
    """The files of one configuration. `choices`: group -> option, by which files of groups are chosen instead.

    `values` is the merged mapping, interpolations unresolved; `chosen` are the groups that the files choose from.
    """

    def __init__(self, path: Path, choices: Mapping[str, str] | None = None) -> None:
        self._root = path.resolve().parent
        self._choices: dict[str, str] = dict(choices or {})
        self._used: set[str] = set()
        self.chosen: set[str] = set()
        self.values: dict[str, Any] = {}
        try:
            self._include(path.resolve(), (), ())
        except RecursionError:
            raise InvalidRequest(f"the configuration {str(path)!r} is nested too deeply") from None

    def _include(self, path: Path, package: tuple[str, ...], within: tuple[Path, ...]) -> None:
        """Merge a file into `values` at `package`. `within` are the files whose defaults lead here."""
        if path in within:
            raise InvalidRequest(f"the defaults of {str(path)!r} lead to the file itself")
        values = _mapping(path)
        values.pop("hydra", None)
        entries = values.pop("defaults", None) or []
        if not isinstance(entries, list):
            raise InvalidRequest(f"defaults of {str(path)!r} must be a list, such as - ../config/traj_envs@_here_")
        self._note_overrides(entries)
        if "_self_" not in entries:
            entries = [*entries, "_self_"]
        for entry in entries:
            if entry == "_self_":
                merge(self.values, _placed(values, package))
            else:
                for each in self._entries(entry, path):
                    self._include_entry(each, path, package, (*within, path))

    def _note_overrides(self, entries: Sequence[Any]) -> None:
        """`override group: option` chooses for the files that are included later; an outer file's choice wins."""
        for entry in entries:
            for key, option in entry.items() if isinstance(entry, Mapping) else ():
                if str(key).startswith("override "):
                    self._choices.setdefault(str(key).removeprefix("override ").strip().lstrip("/"), option)

    def _entries(self, entry: Any, path: Path) -> Iterator[_Entry]:
        if isinstance(entry, str):
            file, _, package = entry.strip().partition("@")
            yield _Entry(file, package or None)
            return
        if not isinstance(entry, Mapping) or len(entry) != 1:
            raise InvalidRequest(f"defaults of {str(path)!r} has {entry!r}; write - file@package or - group: option")
        ((key, option),) = entry.items()
        if str(key).startswith("override "):
            return
        optional = str(key).startswith("optional ")
        group = str(key).removeprefix("optional ").strip()
        name = group.lstrip("/")
        self.chosen.add(name)
        option = self._choices.get(name, option)
        folder, _, package = group.partition("@")
        for each in option if isinstance(option, list) else [option]:
            if each is not None:
                yield _Entry(f"{folder}/{each}", package or None, optional)

    def _include_entry(self, entry: _Entry, path: Path, package: tuple[str, ...], within: tuple[Path, ...]) -> None:
        if entry.file.lstrip("/").startswith("hydra/"):
            return
        found = self._found(entry, path)
        if found is not None:
            self._include(found, self._package_of(entry, found, path, package), within)

    def _found(self, entry: _Entry, path: Path) -> Path | None:
        folder = self._root if entry.file.startswith("/") else path.parent
        file = entry.file.lstrip("/")
        wanted = folder / (file if file.endswith((".yaml", ".yml")) else f"{file}.yaml")
        if wanted.is_file():
            return wanted.resolve()
        if entry.optional:
            return None
        if wanted.name.startswith(_OF_TRAINING):
            logger.warning("%s is missing; it has settings of training only, which have no effect here", wanted)
            return None
        raise InvalidRequest(f"defaults of {str(path)!r} names {entry.file!r}, but there is no file {str(wanted)!r}")

    def _package_of(self, entry: _Entry, found: Path, path: Path, package: tuple[str, ...]) -> tuple[str, ...]:
        """Where an included file stands: what the entry says after `@`, the file's header, or its group."""
        named = entry.package
        if named is None and (header := _HEADER.search(_head(found))):
            named = header.group(1)
            package = () if named not in ("_group_", "_here_") else package
        if named == "_here_":
            return package
        if named == "_global_":
            return ()
        if named in (None, "_group_"):
            folders = [part for part in Path(entry.file).parent.parts if part not in (".", "/")]
            if ".." in folders:
                raise InvalidRequest(
                    f"defaults of {str(path)!r} must say where {entry.file!r} belongs: "
                    f"write - {entry.file}@_here_ for beside its own settings"
                )
            return (*package, *folders)
        assert named is not None
        if named.startswith("_global_."):
            return tuple(named.removeprefix("_global_.").split("."))
        return (*package, *named.removeprefix("_here_.").split("."))


def merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Add `values`: mappings are merged at every depth, and anything else replaces what was there."""
    for name, value in values.items():
        there = into.get(name)
        if isinstance(value, Mapping) and isinstance(there, dict):
            merge(there, value)
        elif isinstance(value, Mapping):
            into[name] = {}
            merge(into[name], value)
        else:
            into[name] = value


def _mapping(path: Path) -> dict[str, Any]:
    values = read_yaml(path)
    if values is not None and not isinstance(values, dict):
        raise InvalidRequest(f"the configuration {str(path)!r} must be a mapping, not {type(values).__name__}")
    return values or {}


def _placed(values: Mapping[str, Any], package: tuple[str, ...]) -> Mapping[str, Any]:
    for name in reversed(package):
        values = {name: values}
    return values


def _head(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.read(4096)
