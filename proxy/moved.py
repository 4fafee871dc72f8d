"""The old names of modules that are in the package `tokengrove` now: for one release they import with a warning.

Pickled objects and stored runs name modules, so an old name gives the very module that the new one gives.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from tokengrove.old_names import new_name


class MovedModules(MetaPathFinder):
    """Finds modules by their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_name(fullname)
        return None if new is None else ModuleSpec(fullname, _Moved(new))

    def install(self) -> None:
        """Look for modules here first: the files of a moved package would be found again by the old name."""
        if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
            sys.meta_path.insert(0, self)


class _Moved(Loader):
    """Gives the module `name` in place of a new one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(
            f"{spec.name} is {self._name} now; the old name goes with the next release", FutureWarning, stacklevel=2
        )
        module = import_module(self._name)
        self._own_spec = module.__spec__  # importlib replaces it
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec
