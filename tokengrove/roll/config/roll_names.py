"""Modules with ROLL's names and our classes, for code that was written for ROLL and runs without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.config.roll_modules import MODULES, ours, why_absent

_PACKAGES = {".".join(name.split(".")[:end]) for name in MODULES for end in range(1, name.count(".") + 2)}


def use_roll_names() -> None:
    """Make `from roll.pipeline.agentic.agent_runner.base import AgentRunner` and the like import our classes.

    A name that is not here raises ImportError with the reason. Repeated calls have no effect. Raises InvalidRequest if
    a package `roll` is installed, which is not replaced.
    """
    if (place := installed_roll()) is not None:
        raise InvalidRequest(
            f"a package named roll is installed at {place}; to use our names, run in an environment without it, "
            "or import from tokengrove.roll"
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # before the finder that treats a folder of that name as a package


def installed_roll() -> str | None:
    """The location of a package `roll` other than our modules; None if there is none.

    A folder of that name counts only if it contains Python code: users keep ROLL's configurations in such folders.
    """
    module = sys.modules.get("roll")
    spec = module.__spec__ if module is not None else _found_by_others()
    if spec is None or isinstance(spec.loader, _Loader):
        return None
    places = list(spec.submodule_search_locations or ())
    if spec.origin is None and places and not any(next(Path(place).rglob("*.py"), None) for place in places):
        return None
    return spec.origin or ", ".join(places or ["this process"])


def _found_by_others() -> ModuleSpec | None:
    for finder in sys.meta_path:
        if not isinstance(finder, _Finder) and (spec := finder.find_spec("roll", None)) is not None:
            return spec
    return None


class _Finder(MetaPathFinder):
    """Finds the modules of `MODULES` and their packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "roll" and not fullname.startswith("roll."):
            return None
        if fullname not in _PACKAGES:  # also requested by `from module import name` if the module lacks the name
            raise ImportError(why_absent(fullname), name=fullname)
        return ModuleSpec(fullname, _Loader(), origin="Tokengrove", is_package=True)


class _Loader(Loader):
    """Creates modules whose names are looked up on access."""

    def exec_module(self, module: ModuleType) -> None:
        names = MODULES.get(module.__name__, {})
        module.__all__ = list(names)  # type: ignore[attr-defined]
        module.__getattr__ = _lookup(module.__name__, names)  # type: ignore[method-assign]


def _lookup(module: str, names: Iterable[str]) -> Callable[[str], Any]:
    def lookup(name: str) -> Any:
        found = ours(f"{module}.{name}") if name in names else None
        if found is None:
            raise AttributeError(why_absent(f"{module}.{name}"))
        return found

    return lookup
