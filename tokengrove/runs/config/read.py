"""Reads the file of `--config`. The command line takes precedence; an unknown key is an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.roll.config import compose, referred
from tokengrove.rollout.config import Config
from tokengrove.rollout.episodes import Task
from tokengrove.runs.config.of_roll import SEED, RollFile, is_of_roll, is_section_of_roll
from tokengrove.runs.config.own_keys import NAMES, SERVER, converted, near


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
