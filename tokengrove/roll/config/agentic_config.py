"""The configuration of a run in ROLL's format: `AgenticConfig.from_yaml(path)` and `AgenticConfig(mapping)`."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tokengrove.errors import InvalidRequest
from tokengrove.roll.config.batch_sizes import fit_train, fit_val
from tokengrove.roll.config.composition import Known, composed
from tokengrove.roll.config.env_manager_config import EnvManagerConfig
from tokengrove.roll.config.environments import env_configs_of
from tokengrove.roll.config.fields import as_mapping, check_near, checked, made, nearest
from tokengrove.roll.config.generating_arguments import GeneratingArguments
from tokengrove.roll.config.training_settings import DEFAULTS, OF_WORKERS, ROLES
from tokengrove.roll.values import Section
from tokengrove.rollout.config import Config
from tokengrove.rollout.failure_log import checked_most

logger = logging.getLogger(__name__)

_MANAGERS = {"train_env_manager": "train_env", "val_env_manager": "val_env"}
_SECTIONS = ("custom_envs", "actor_infer")
_NEAR = 0.85
"""The similarity, from 0 to 1, at which a name counts as a misspelt setting, where users may have their own names."""
_INCLUDED = "custom_env"
"""The section of ROLL's files with the environments that `custom_envs` selects from."""
_said: set[str] = set()


@dataclass
class EnvMonitorConfig:
    """Warnings about environments that have played one episode for more than `hung_timeout` seconds.

    `monitor_interval`: seconds between checks.
    """

    enable: bool = True
    monitor_interval: int = 30
    hung_timeout: int = 3600


@dataclass
class RolloutMockConfig:
    """Writes batches to `dump_dir` (mode `dump`), or reads them from there instead of playing (mode `mock`)."""

    enable: bool = False
    mode: str = "dump"
    dump_dir: str = "./rollout_mock_dumps"

    def __post_init__(self) -> None:
        if self.mode not in ("dump", "mock"):
            raise InvalidRequest(
                f"rollout_mock.mode must be dump or mock, not {self.mode!r}", param="rollout_mock.mode"
            )


@dataclass(init=False, repr=False, eq=False)
class AgenticConfig:
    """The settings of a run, with ROLL's names and defaults. ROLL's training settings can be read as attributes.

    `train_env_manager.env_configs` and `val_env_manager.env_configs` have the configuration of every environment; a
    manager that is missing in the configuration has no environments. `sequence_length` limits an episode, in tokens; by
    default it is `prompt_length` plus `response_length`. `max_steps` is the number of batches; -1: no limit.
    `generating_args` are those of `actor_infer`, else those of `train_env_manager`. `val_batch_size` defaults to the
    number of validation environments. `custom_envs` has the environments by tag; tags that it lacks are taken from
    `custom_env`, where ROLL's files have them. `apply_reward_discount` replaces the scores of turns by returns,
    discounted with `step_reward_gamma`; without it the scores are raw, as ROLL's trainer expects, because it discounts
    them itself. After `max_failed_episodes` failed episodes in a row the run ends; None: three groups; -1: no limit.

    Raises InvalidRequest, with the field and a fix, where ROLL's assertions fail, and for a misspelt name.
    """

    exp_name: str = "agentic"
    seed: int = 42
    pretrain: str | None = None
    sequence_length: int = 0
    prompt_length: int = 1024
    response_length: int | None = None
    rollout_batch_size: int = 128
    val_batch_size: int = 128
    async_generation_ratio: float = 0
    generate_opt_level: int = 1
    max_steps: int = 500
    eval_steps: int = 10
    rollout_dump_dir: str | None = None
    rollout_mock: RolloutMockConfig | None = None
    env_monitor: EnvMonitorConfig = field(default_factory=EnvMonitorConfig)
    system_envs: dict[str, Any] = field(default_factory=dict)
    custom_envs: Any = field(default_factory=Section)
    train_env_manager: EnvManagerConfig = field(default_factory=EnvManagerConfig)
    val_env_manager: EnvManagerConfig = field(default_factory=EnvManagerConfig)
    actor_infer: Any = field(default_factory=Section)
    skip_mock_system_prompt: bool = False
    step_reward_gamma: float = 0.95
    apply_reward_discount: bool = False
    is_pure_opd: bool = False
    max_failed_episodes: int | None = None

    def __init__(self, values: object = None, /, **more: Any) -> None:
        """`values`: a mapping, including Config and OmegaConf's DictConfig. Names in `more` take precedence."""
        config = Config({} if values is None else values)
        self._config = Config({**config, **more}) if more else config
        self._objects = {name: value for name, value in more.items() if dataclasses.is_dataclass(value)}
        check_setting_names(self._config)
        self._read_values()
        self._check_values()
        self._read_generating_args()
        self._make_environments()

    @classmethod
    def from_yaml(cls, path: str | PathLike[str], overrides: Sequence[str] = ()) -> AgenticConfig:
        """Read a YAML file, the files in its `defaults`, and overrides such as `train_env_manager.group_size=4`.

        Raises InvalidRequest, also for a file that is missing or is not valid YAML.
        """
        return cls(compose(path, overrides))

    def __getattr__(self, name: str) -> Any:
        """A setting of ROLL's training, or a setting that the configuration defines for its own interpolations."""
        if name.startswith("_"):  # looked up by copy and pickle
            raise AttributeError(name)
        if name in self._config:
            value = self._config[name]
            value = Section(value.to_dict()) if isinstance(value, Config) else value
        elif name in DEFAULTS or name in ROLES:
            value = DEFAULTS[name] if name in DEFAULTS else Section()
        else:
            raise AttributeError(f"the configuration has no {name!r}{nearest(name, _settings())}")
        self.__dict__[name] = value
        return value

    def __repr__(self) -> str:
        return f"AgenticConfig({self.to_dict()!r})"

    @property
    def seed_is_given(self) -> bool:
        """Whether the configuration has a `seed`, which determines the plan of a run; otherwise plans are random."""
        return self._config.get("seed") is not None

    @property
    def async_pipeline(self) -> bool:
        """Whether episodes are generated before the batch that needs them."""
        return self.async_generation_ratio > 0

    def set_max_steps(self, max_steps: int) -> None:
        """Change the number of batches."""
        self.max_steps = max_steps

    def to_dict(self) -> dict[str, Any]:
        """The settings that have an effect here, as plain dicts and lists."""
        return Section(dataclasses.asdict(self)).to_dict()

    def _read_values(self) -> None:
        hints = get_type_hints(AgenticConfig)
        for each in dataclasses.fields(self):
            value = self._config.get(each.name)
            if value is not None:
                value = self._read(each.name, value, hints[each.name])
            elif each.name in _MANAGERS:
                value = EnvManagerConfig(name=_MANAGERS[each.name], num_env_groups=0, tags=[])
            elif each.name in _SECTIONS:
                value = Section()
            elif each.default is not dataclasses.MISSING:
                value = each.default
            elif each.default_factory is not dataclasses.MISSING:
                value = each.default_factory()
            setattr(self, each.name, value)

    def _read(self, name: str, value: Any, hint: Any) -> Any:
        value = value.to_dict() if isinstance(value, Config) else value
        if name in _MANAGERS:
            return self._read_manager(name, value)
        if name in self._objects:
            return self._objects[name]
        return Section(as_mapping(value, name)) if name in _SECTIONS else checked(value, hint, name)

    def _read_manager(self, name: str, value: Any) -> EnvManagerConfig:
        if isinstance(manager := self._objects.get(name), EnvManagerConfig):
            manager.name = _MANAGERS[name]
            manager.check()
            return manager
        given = {**as_mapping(value, name), "name": _MANAGERS[name]}
        _say(name, [each for each in (*OF_WORKERS, "format_penalty") if each in given])
        return made(EnvManagerConfig, given, name, ignored=OF_WORKERS)

    def _read_generating_args(self) -> None:
        """As in ROLL, both managers use those of actor_infer, else those of the train manager."""
        check_near(self.actor_infer, ("generating_args",), "actor_infer", beside=OF_WORKERS)
        if self.is_pure_opd:
            self.actor_infer = Section(as_mapping(self.student_infer, "student_infer"))
        managers = self.train_env_manager, self.val_env_manager
        if (given := self.actor_infer.get("generating_args")) is not None:
            found = made(GeneratingArguments, given, "actor_infer.generating_args")
            for manager in managers:
                if manager.generating_args is not None and manager.generating_args != found:
                    _say_once(
                        f"{manager.section}generating_args has no effect, as in ROLL: actor_infer.generating_args has "
                        f"precedence. To use it, remove actor_infer.generating_args and set it in both managers"
                    )
                manager.generating_args = found
        elif (own := self.train_env_manager.generating_args) is not None:
            found = own
            if self.val_env_manager.generating_args is None:
                self.val_env_manager.generating_args = own
        else:
            found = GeneratingArguments(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=self.sequence_length)
            _say_once(
                "neither actor_infer nor train_env_manager has generating_args: answers are sampled with temperature 1 "
                "from all tokens, and max_tokens_per_step limits them"
            )
            for manager in managers:
                manager.generating_args = manager.generating_args or found
        self.actor_infer["generating_args"] = found
        for manager in managers:
            if manager.generating_args is not None:
                manager.generating_args.num_return_sequences = 1

    def _check_values(self) -> None:
        if not self.sequence_length:
            if not self.response_length:
                raise InvalidRequest(
                    "sequence_length (the maximum tokens of an episode) is missing; set it, or response_length",
                    param="sequence_length",
                )
            self.sequence_length = self.prompt_length + self.response_length
        if self.sequence_length < 1:
            raise InvalidRequest(
                f"sequence_length is {self.sequence_length}; it must be positive", param="sequence_length"
            )
        if self.max_steps <= 0 and self.max_steps != -1:
            raise InvalidRequest(
                f"max_steps is {self.max_steps}; it must be positive, or -1 for no limit", param="max_steps"
            )
        checked_most(self.max_failed_episodes)
        if self.async_generation_ratio < 0 or not 0 <= self.step_reward_gamma <= 1:
            name = "step_reward_gamma" if self.async_generation_ratio >= 0 else "async_generation_ratio"
            raise InvalidRequest(
                f"{name} is {getattr(self, name)}; it must be at least 0, and step_reward_gamma at most 1", param=name
            )
        if self.async_generation_ratio > 0 and self.generate_opt_level != 1:
            raise InvalidRequest(
                f"generate_opt_level must be 1 when async_generation_ratio is {self.async_generation_ratio}",
                param="generate_opt_level",
            )

    def _make_environments(self) -> None:
        seed = self.seed if self.seed_is_given else None
        for manager in (self.train_env_manager, self.val_env_manager):
            manager.model_args = Section(model_name_or_path=self.pretrain)
            manager.system_envs = {
                name: str(value) for name, value in {**self.system_envs, **manager.system_envs}.items()
            }
            manager.env_configs = env_configs_of(manager, self._environments_of(manager), seed)
        if self.train_env_manager.env_configs:
            fit_train(self.train_env_manager, self.rollout_batch_size, self.async_generation_ratio)
        if (val := self.val_env_manager).env_configs:
            if "val_batch_size" not in self._config:  # ROLL's default of 128 fits few numbers of environments
                self.val_batch_size = val.num_env_groups * val.group_size
            fit_val(val, self.val_batch_size)

    def _environments_of(self, manager: EnvManagerConfig) -> Mapping[str, Any]:
        """`custom_envs`, and the environments of `custom_env` for tags that `custom_envs` lacks."""
        lacking = [tag for tag in manager.tags if tag not in self.custom_envs]
        others = self._config.get(_INCLUDED) if lacking else None
        found = {tag: others[tag].to_dict() for tag in lacking if isinstance(others, Config) and tag in others}
        if found:
            _say_once(f"environments missing in custom_envs are taken from custom_env: {', '.join(found)}")
        return {**found, **self.custom_envs}


def compose(
    path: str | PathLike[str],
    overrides: Sequence[str] = (),
    known: Known = lambda path: False,
) -> dict[str, Any]:
    """The mapping composed of a YAML file, the files of its `defaults` and `overrides`; interpolations are kept.

    `known`: the settings, in addition to ROLL's, that an override may set even if the files lack them. Raises
    InvalidRequest for a file that is missing or is not valid YAML, and for an override of an unknown setting.
    """
    file = Path(path)
    if not file.exists() and file.suffix not in (".yaml", ".yml"):
        file = file.with_name(f"{file.name}.yaml")
    return composed(file, overrides, lambda path: known(path) or _is_setting(path))


def _is_setting(path: tuple[str, ...]) -> bool:
    """Whether a path is a setting, which the files may lack."""
    first = path[0]
    if first in ROLES or first == "actor_infer":
        return True
    hint: Any = AgenticConfig
    for name in path:
        options = [each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)]
        hints = get_type_hints(options[0]) if options else {}
        if name not in hints:
            return path == (first,) and first in DEFAULTS
        hint = hints[name]
    return True


def _settings() -> list[str]:
    return [*(each.name for each in dataclasses.fields(AgenticConfig)), *DEFAULTS, *ROLES, _INCLUDED]


def check_setting_names(config: Config) -> None:
    """Raise InvalidRequest for a misspelt setting that no interpolation uses.

    Settings without effect are logged.
    """
    given = set(map(str, config))
    known = _settings()
    needed = set(referred(config.source()))
    for name in sorted(given - {*known, *needed}):
        one_letter = 1 - 1 / max(4, len(name))  # in a short name, one wrong letter exceeds the share below
        if near := get_close_matches(name, known, 1, min(_NEAR, one_letter)):
            raise InvalidRequest(f"the configuration has no setting {name!r}; did you mean {near[0]!r}?", param=name)
    _say("", sorted(given & {*DEFAULTS, *ROLES}))


def referred(value: Any) -> Iterator[str]:
    """The first names of the interpolations in all texts of a value."""
    if isinstance(value, str):
        yield from re.findall(r"\$\{(\w+)", value)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from referred(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from referred(each)


def _say(section: str, names: list[str]) -> None:
    """Log, once per process, which settings have no effect."""
    new = [name for name in names if f"{section}.{name}" not in _said]
    _said.update(f"{section}.{name}" for name in new)
    if new:
        where = f" of {section}" if section else ""
        logger.warning("settings%s of ROLL's training, cluster and logs have no effect here: %s", where, ", ".join(new))


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning("%s", message)
