"""Reads the file of `--config`. What is given on the command line wins; an unknown key is an error."""

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
    """What a file says, with what was given on the command line.

    `values` are fields of RunOptions, `server` settings of `tokengrove serve`. `tasks`: those of ROLL's environments;
    None: `data` names them. `folder` is the file's, where its modules may lie. `model` is that of ROLL's `pretrain`,
    for a server of the run's own that is told neither model nor engine.
    """

    values: Mapping[str, Any]
    folder: Path
    server: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[Task, ...] | None = None
    model: str | None = None


def read(
    path: Path, overrides: Sequence[str] = (), *, given: Mapping[str, Any] | None = None, validation: bool = False
) -> RunFile:
    """Read a YAML file. It may have a `defaults` list and `${...}`, as hydra's have.

    `overrides` are changes such as `group_size=4`. `given` are the options of the command line. `validation`: the run
    measures the policy, so of ROLL's keys those of validation count. Paths in the file are relative to it.

    Raises ConfigurationError that names the file and the key.
    """
    try:
        values = compose(path, overrides, known=_is_own)
        used = set(referred(values))
        if overrides and _divided(values)[2] - used:  # an override may have replaced what needed a name
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
    """The options of the file with those of the command line, which win: of a mapping by its names, and an agent over a
    command.
    """
    rivals = {"agent": "command", "command": "agent"}
    over = {name: value for name, value in options.items() if rivals.get(name) not in given}
    for name, value in given.items():
        before = over.get(name)
        over[name] = {**before, **value} if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return over


def _divided(values: Mapping[str, Any]) -> tuple[set[str], set[str], set[str]]:
    """The names that are a run's own, those of ROLL, and the rest."""
    own = {name for name in values if name in NAMES and not is_section_of_roll(name, values[name])}
    of_roll = {name for name in values if is_of_roll(name) and name not in own}
    return own, of_roll, set(values) - own - of_roll - {SERVER}


def _check_names(values: Mapping[str, Any], used: Collection[str]) -> None:
    """Raise InvalidRequest for an unknown key; `used` are those that interpolations need.

    Files of ROLL have further names of their users; of these only a misspelt one is wrong.
    """
    _, of_roll, others = _divided(values)
    known = f"; there are {', '.join(NAMES)} and {SERVER}"
    for name in sorted(others - set(used), key=str):
        hint = near(name, closely=bool(of_roll))
        if hint or not of_roll:
            raise InvalidRequest(f"there is no setting {name!r}{hint or known}")


def _plain(value: Any) -> Any:
    return value.to_dict() if isinstance(value, Config) else value
