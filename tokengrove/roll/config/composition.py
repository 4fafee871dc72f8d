"""Composition of a configuration with hydra: the files in its `defaults` list, and overrides such as `a.b=1`.

Hydra is imported only here, and only for files that need it. The extra `roll` installs it.
"""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from tokengrove.errors import InvalidRequest, how_to_get
from tokengrove.roll.config.yaml_text import read_yaml

logger = logging.getLogger(__name__)

Known = Callable[[tuple[str, ...]], bool]
"""Whether a path is a setting, which an override may set even if the files lack it."""

_OF_TRAINING = "deepspeed_"
"""The prefix of files with settings of DeepSpeed only. They may be missing, since ROLL no longer ships them."""
_one_at_a_time = threading.Lock()
"""Hydra composes with global objects of the process."""


def composed(path: Path, overrides: Sequence[str], known: Known) -> dict[str, Any]:
    """The mapping composed of a file, the files of its `defaults` and `overrides`; interpolations are kept.

    Raises InvalidRequest with the file's name.
    """
    if isinstance(overrides, str):
        raise InvalidRequest(f"overrides must be a list of texts, such as [{overrides!r}]")
    values = read_yaml(path)
    if values is not None and not isinstance(values, dict):
        raise InvalidRequest(f"the configuration {str(path)!r} must be a mapping, not {type(values).__name__}")
    values = values or {}
    if overrides or "defaults" in values:
        path = path.resolve()
        return _by_hydra(path, [_change(each, path, known) for each in overrides])
    values.pop("hydra", None)  # settings of hydra
    return values


def _change(override: str, path: Path, known: Known) -> str:
    """The override in hydra's syntax, which marks settings that the files lack. The choice of a file is not marked."""
    name = override.partition("=")[0].strip()
    is_change = "=" in override and re.fullmatch(r"[\w.]+", name)
    is_group = (path.parent / name).is_dir()
    return f"++{override.strip()}" if is_change and not is_group and known(tuple(name.split("."))) else override.strip()


def _by_hydra(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        from hydra.errors import HydraException, MissingConfigException
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"{str(path)!r}: a defaults list and overrides (KEY=VALUE) need the package {error.name}: "
            f"{how_to_get('tokengrove[roll]')}"
        ) from None
    if path.suffix != ".yaml":
        raise InvalidRequest(f"{str(path)!r}: hydra reads files whose names end in .yaml; rename it")
    missing: list[str] = []
    while True:
        try:
            return _once(path, overrides, missing)
        except MissingConfigException as error:
            missing.append(_may_be_missing(str(error.missing_cfg_file), path, missing))
        except RecursionError:
            raise InvalidRequest(
                f"the defaults of {str(path)!r} include the file itself, or the configuration {str(path)!r} "
                "is nested too deeply"
            ) from None
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
            raise _refused(error, path, overrides) from None


def _once(path: Path, overrides: Sequence[str], missing: Sequence[str]) -> dict[str, Any]:
    """`missing`: files that hydra treats as empty."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    with _own_hydra():
        for folder, _, file in (name.rpartition("/") for name in missing):
            ConfigStore.instance().store(name=file, node={}, group=folder or None)
        with hydra.initialize_config_dir(config_dir=str(path.parent), version_base=None):
            config = hydra.compose(config_name=path.stem, overrides=list(overrides))
    values = OmegaConf.to_container(config, resolve=False)
    return cast(dict[str, Any], values)


@contextmanager
def _own_hydra() -> Iterator[None]:
    """A fresh state of hydra during the block. Afterwards the program's state and store of hydra are restored."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.singleton import Singleton

    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # hydra warns of ROLL's files, which have no _self_
        store = ConfigStore.instance()
        before = dict(Singleton._instances)
        Singleton._instances.clear()
        ConfigStore.instance().repo = deepcopy(store.repo)
        try:
            yield
        finally:
            Singleton._instances.clear()
            Singleton._instances.update(before)


def _may_be_missing(name: str, path: Path, already: Sequence[str]) -> str:
    """The name of a missing file of training settings. Raises InvalidRequest for other files."""
    if not name.rpartition("/")[2].startswith(_OF_TRAINING) or name in already:
        raise InvalidRequest(f"a defaults list of {str(path)!r} names {name!r}, but there is no file of that name")
    logger.warning("%s is missing; it has settings of training only, which have no effect here", name)
    return name


def _refused(error: Exception, path: Path, overrides: Sequence[str]) -> InvalidRequest:
    """Hydra's message, or a more helpful one: the nearest name, or the section that an interpolation refers to."""
    said = (str(error) or str(error.__cause__)).partition("\nSee https://")[0].strip()
    for each in overrides:
        name = each.lstrip("~").partition("=")[0].strip()
        if re.fullmatch(r"[\w.-]+", name) and name in said and (hint := _hint(_by_hydra(path, ()), name, each)):
            return InvalidRequest(f"the override {each!r}: {hint}", param=name)
    return InvalidRequest(f"the configuration {str(path)!r}: {said}")


def _hint(values: Mapping[str, Any], name: str, override: str) -> str | None:
    """Why a path does not exist, and a fix; None if hydra's message is sufficient."""
    section: Any = values
    parts = name.split(".")
    for at, part in enumerate(parts):
        so_far, rest = ".".join(parts[:at]), ".".join(parts[at:])
        if isinstance(section, str) and (referred := re.fullmatch(r"\$\{([\w.]+)\}", section.strip())):
            return f"{so_far} is {section}; change it there: {referred[1]}.{rest}=..."
        if isinstance(section, list):
            section = {str(index): value for index, value in enumerate(section)}
        if not isinstance(section, Mapping):
            return f"it needs a section at {so_far}, which is {section!r}"
        if part not in section:
            return _lacking(section, part, so_far, override)
        section = section[part]
    return None


def _lacking(section: Mapping[Any, Any], part: str, so_far: str, override: str) -> str:
    if part.isdecimal() and int(part) in section:
        return f"the key {part} of {so_far} is a number; write {so_far}={{{part}: ...}}"
    near = get_close_matches(part, map(str, section), 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    way = "" if override.startswith("~") else f"; to add it, write +{override}"
    return f"the configuration has no {part!r}{hint}{way}"
