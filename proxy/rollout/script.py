"""The script of a program, for processes that it starts: they import it under another name, and only if they have to.

What is defined in `__main__` is pickled by its name there, so another process can rebuild it only after importing the
script. A script that begins its work at once would do that work again.
"""

from __future__ import annotations

import multiprocessing.spawn
from pathlib import Path
from typing import Any

_importing = False


def script_of_this_process() -> dict[str, Any]:
    """Where another process finds the script: its module or its file. Empty for a notebook, a prompt and stdin."""
    data = multiprocessing.spawn.get_preparation_data("tokengrove")
    file = data.get("init_main_from_path")
    if "init_main_from_name" not in data and (file is None or not Path(file).is_file()):
        return {}
    return {name: data[name] for name in ("init_main_from_name", "init_main_from_path", "sys_argv") if name in data}


def import_script(where: dict[str, Any]) -> None:
    """Import it as the `__main__` of this process, where its `__name__` is `__mp_main__`. What it raises is raised."""
    global _importing
    _importing = True
    try:
        multiprocessing.spawn.prepare(where)
    finally:
        _importing = False


def check_not_imported() -> None:
    """Raise RuntimeError if the script is just being imported by a process that it has started."""
    if _importing:
        raise RuntimeError(
            "a process imports this script for an agent that is defined in it, and the script begins its work again: "
            'let it begin below `if __name__ == "__main__":`, or put the agent into a module of its own'
        )
