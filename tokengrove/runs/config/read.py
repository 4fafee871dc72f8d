"""Reads the file of `--config`. The command line takes precedence; an unknown key is an error."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.options.option import options_of
from tokengrove.options.values import read_value
from tokengrove.roll.config import compose, referred
from tokengrove.rollout.config import Config
from tokengrove.rollout.episodes import Task
from tokengrove.rollout.run_options import RunOptions
from tokengrove.runs.config.of_roll import SEED, RollFile, is_of_roll, is_section_of_roll

SERVER = "server"
_OF_COMMANDS = {"validation"}
"""Set by the command: `tokengrove eval` validates."""
_OPTIONS = options_of(RunOptions)
NAMES = tuple(name for name in _OPTIONS if name not in _OF_COMMANDS)
_PATHS = ("data", "folder", "output")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.\w+)*:\w+(\.\w+)*")


def converted(name: str, value: Any, folder: Path) -> Any:
    """The value of an option. A relative path is relative to `folder`. Raises InvalidRequest for a wrong type."""
    if value is None:
        return None
    option = _OPTIONS[name]
    if option.repeats and isinstance(value, str):
        value = shlex.split(value) if name == "command" else [value]
    try:
        found = read_value(option, value, numbers=option.repeats)
    except ValueError as error:
        raise InvalidRequest(f"{name} must be {error}, not {value!r}") from None
    if name in _PATHS and not _FUNCTION.fullmatch(found):
        return str(folder / found)
    return found


def near(name: object, *, closely: bool = False) -> str:
    """`; did you mean X?` if there is a similar name, else ""."""
    found = get_close_matches(str(name).replace("-", "_"), [*NAMES, SERVER], 1, 0.85 if closely else 0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


@dataclass(frozen=True, slots=True)
class RunFile:
    """The contents of a file, merged with the command line.

    `values`: fields of RunOptions; `server`: settings of `tokengrove serve`. `tasks`: the tasks of ROLL's environments;
    None: `data` names the tasks. `folder`: the file's folder, where its modules may be. `model`: ROLL's `pretrain`, for
    the run's own server if neither its model nor its engine is set.
    """

    values: Mapping[str, Any]
    folder: Path
    server: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[Task, ...] | None = None
    model: str | None = None


def read(
    path: Path, overrides: Sequence[str] = (), *, given: Mapping[str, Any] | None = None, validation: bool = False
) -> RunFile:
    """Read a YAML file. Like hydra's files, it may have a `defaults` list and `${...}`.

    `overrides`: changes such as `group_size=4`. `given`: the options of the command line. `validation`: the run
    measures the policy, so ROLL's validation keys apply. Paths in the file are relative to its folder.

    Raises ConfigurationError that names the file and the key.
    """
    try:
        values = compose(path, overrides, known=_is_own)
        used = set(referred(values))
        if overrides and _divided(values)[2] - used:  # an override may have replaced the user of a name
            used |= set(referred(compose(path)))
        _check_names(values, used)
        return _made(path, values, given or {}, validation)
    except InvalidRequest as error:
        raise ConfigurationError(f"--config {path}: {error.message}") from None


def _is_own(path: tuple[str, ...]) -> bool:
    return path[0] in NAMES or path[0] == SERVER


def _made(path: Path, values: Mapping[str, Any], given: Mapping[str, Any], validation: bool) -> RunFile:
    config, folder = Config(values), path.resolve().parent
    own, of_roll, others = _divided(values)
    options = {name: converted(name, _plain(config[name]), folder) for name in own}
    server = _plain(config.get(SERVER)) or {}
    if not isinstance(server, Mapping):
        raise InvalidRequest(f"{SERVER} must be a mapping of settings of `tokengrove serve`, not {server!r}")
    if not of_roll:
        return RunFile(_over(options, given), folder, server)
    roll = RollFile({name: values[name] for name in (*of_roll, *others, *own & {SEED})}, validation)
    if {"agent", "command"} & (options.keys() | given.keys()):
        return RunFile(_over({**roll.options(), **options}, given), folder, server, model=roll.model)
    found, tasks = roll.environments(_over(options, given))
    return RunFile(_over({**found, **options}, given), folder, server, tasks, roll.model)


def _over(options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the file, overridden by those of the command line.

    Mappings are merged key by key. An agent replaces a command, and a command an agent.
    """
    rivals = {"agent": "command", "command": "agent"}
    over = {name: value for name, value in options.items() if rivals.get(name) not in given}
    for name, value in given.items():
        before = over.get(name)
        over[name] = {**before, **value} if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return over


def _divided(values: Mapping[str, Any]) -> tuple[set[str], set[str], set[str]]:
    """The names of a run's own keys, of ROLL's keys, and the rest."""
    own = {name for name in values if name in NAMES and not is_section_of_roll(name, values[name])}
    of_roll = {name for name in values if is_of_roll(name) and name not in own}
    return own, of_roll, set(values) - own - of_roll - {SERVER}


def _check_names(values: Mapping[str, Any], used: Collection[str]) -> None:
    """Raise InvalidRequest for an unknown key. `used`: the keys that interpolations need.

    Files of ROLL may have further names that users define. Of these, only a name similar to a known key is an error.
    """
    _, of_roll, others = _divided(values)
    known = f"; there are {', '.join(NAMES)} and {SERVER}"
    for name in sorted(others - set(used), key=str):
        hint = near(name, closely=bool(of_roll))
        if hint or not of_roll:
            raise InvalidRequest(f"there is no setting {name!r}{hint or known}")


def _plain(value: Any) -> Any:
    return value.to_dict() if isinstance(value, Config) else value
