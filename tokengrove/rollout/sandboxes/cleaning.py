"""Kills the processes that programs of agents have left and removes their folders, even after their owner was killed.

`python cleaning.py FOLDER MARK` is started next to each process that has sandboxes. It waits until this process has
ended in any way, and cleans up. It imports only the standard library, to start fast.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "SANDBOX_OF_TOKENGROVE"
"""The variable that identifies the processes of a program, including processes that left its process group."""

WORKTREE = "worktree"
"""A file next to a working folder `work` that is a git worktree, with the path of the repository's entry of it."""

_LOOKS, _LOOK_S = 500, 0.01


def clean(folder: str, mark: str) -> None:
    """Kill the processes whose MARK begins with `mark` or that work in `folder`, on Linux, and remove `folder`."""
    kill_marked(mark, folder)
    forget_worktrees(folder)
    try:
        for root, folders, _ in os.walk(folder):
            for path in (Path(root, name) for name in folders):
                if not path.is_symlink():
                    path.chmod(0o700)  # so that read-only folders can be removed
        shutil.rmtree(folder, ignore_errors=True)
    except (OSError, RecursionError):  # folders that are nested too deeply
        subprocess.run(["rm", "-rf", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def kill_marked(mark: str, folder: str | None = None) -> None:
    """Kill the processes whose MARK begins with `mark` or that work in `folder`, on Linux.

    It misses only processes that have both cleared their environment and left the folder.
    """
    needle = f"{MARK}={mark}".encode()
    for _ in range(_LOOKS):
        if not any([_kill_marked(pid, needle, folder) for pid in _pids()]):
            break
        time.sleep(_LOOK_S)  # a killed process ends shortly afterwards


def forget_worktrees(folder: str) -> None:
    """Remove the repositories' entries of the worktrees in `folder`, a sandbox or a folder of sandboxes."""
    for note in [*Path(folder).glob(WORKTREE), *Path(folder).glob(f"*/{WORKTREE}")]:
        try:
            entry = Path(note.read_text())
            # Only the entry of this worktree: an agent may have changed the file.
            if (entry / "gitdir").read_text().strip() == str(note.parent / "work" / ".git"):
                shutil.rmtree(entry)
        except (OSError, ValueError):
            pass  # it no longer exists


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []


def _kill_marked(pid: int, needle: bytes, folder: str | None) -> bool:
    """Kill a process that works in the folder or whose initial environment has the mark."""
    try:
        if pid == os.getpid() or not (_has_mark(pid, needle) or (folder and _is_in(pid, folder))):
            return False
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True


def _has_mark(pid: int, needle: bytes) -> bool:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return any(variable.startswith(needle) for variable in variables)


def _is_in(pid: int, folder: str) -> bool:
    return f"{os.readlink(f'/proc/{pid}/cwd')}/".startswith(f"{folder}/")


if __name__ == "__main__":
    sys.stdin.buffer.read()  # ends when the process at the other end ends
    clean(*sys.argv[1:])
