"""The script of a program, for processes that it starts: they import it under another name, and only if they have to.

What is defined in `__main__` is pickled by its name there, so another process can rebuild it only after importing the
script. It imports it up to the place where the script begins to run agents, which it must not do again.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

_importing = False


class Script(NamedTuple):
    """Where the script is: its module, as of `python -m`, or its file; both None in a notebook, a prompt and stdin."""

    module: str | None
    file: str | None
    arguments: list[str]


class _BeginsWork(BaseException):
    """Ends the import; no `except Exception` of the script should keep it."""


def script_of_this_process() -> Script:
    """The script that this process runs."""
    main: Any = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    file: str | None = getattr(main, "__file__", None)
    # `__main__.py` of a package has no definitions to import, only work.
    module = None if spec is None or spec.name.rpartition(".")[2] == "__main__" else spec.name
    if spec is not None or file is None or not Path(file).is_file():
        file = None
    return Script(module, file and str(Path(file).resolve()), sys.argv)


def import_script(script: Script) -> None:
    """Import it as the `__main__` of this process, where its `__name__` is `__mp_main__`. What it raises is raised."""
    global _importing
    main = ModuleType("__mp_main__")
    code = _code(script, main)
    sys.argv = script.arguments
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    _importing = True
    try:
        exec(code, vars(main))
    except _BeginsWork:
        pass  # what stands above is defined
    finally:
        _importing = False


def stop_import() -> None:
    """End the import of the script, if a process that it has started imports it: what follows is work."""
    if _importing:
        raise _BeginsWork


def _code(script: Script, main: ModuleType) -> CodeType:
    """Compile the script, and set the attributes by which its module finds itself."""
    if script.module is not None:
        spec = importlib.util.find_spec(script.module)
        if spec is not None and spec.origin is not None:
            main.__package__, main.__file__ = spec.parent, spec.origin
            return compile(Path(spec.origin).read_bytes(), spec.origin, "exec")
    if script.file is None:
        raise ModuleNotFoundError(f"there is no script to import: {script}")
    main.__file__ = script.file
    return compile(Path(script.file).read_bytes(), script.file, "exec")
