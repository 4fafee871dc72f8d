"""The script of this program, for processes that it starts. They import it only if needed, under another name.

Definitions in `__main__` are pickled by their name there, so another process must import the script before it can
unpickle them. The import stops where the script begins to run agents, which the other process must not repeat.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

_importing = False


class Script(NamedTuple):
    """The location of a script: its module, as for `python -m`, or its file; both None in a notebook, a prompt or
    stdin.
    """

    module: str | None
    file: str | None
    arguments: list[str]


class _BeginsWork(BaseException):
    """Ends the import. It is not an Exception, so that `except Exception` in the script does not catch it."""


def script_of_this_process() -> Script:
    """The script that this process runs."""
    main: Any = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    file: str | None = getattr(main, "__file__", None)
    # The `__main__.py` of a package has no definitions to import; it only starts work.
    module = None if spec is None or spec.name.rpartition(".")[2] == "__main__" else spec.name
    if spec is not None or file is None or not Path(file).is_file():
        file = None
    return Script(module, file and str(Path(file).resolve()), sys.argv)


def import_script(script: Script) -> None:
    """Import the script as the `__main__` of this process, with the `__name__` `__mp_main__`. Raises its exceptions."""
    global _importing
    main = ModuleType("__mp_main__")
    code = _code(script, main)
    sys.argv = script.arguments
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    _importing = True
    try:
        exec(code, vars(main))
    except _BeginsWork:
        pass  # the definitions above are complete
    finally:
        _importing = False


def stop_import() -> None:
    """End the import of the script if this process is importing it: work follows."""
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
        raise ModuleNotFoundError(f"no script to import: {script}")
    main.__file__ = script.file
    return compile(Path(script.file).read_bytes(), script.file, "exec")
