"""The folders of this process's sandboxes, which are cleaned up whenever and however the process ends."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path

from tokengrove import initial_block
from tokengrove.rollout.sandboxes import cleaning


class _Folders:
    """`parent` has the folders of one process; `mark` is what the marks of its sandboxes begin with."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.mark = uuid.uuid4().hex
        self.parent = Path(tempfile.mkdtemp(prefix="tokengrove-sandboxes-")).resolve()
        self.numbers = itertools.count()
        command = [sys.executable, "-E", "-S", cleaning.__file__, str(self.parent), self.mark]
        # A session of its own, since whoever ends this process may end its group.
        self.cleaner = subprocess.Popen(
            command,
            cwd="/",
            env=initial_block.without_secrets(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


_folders: _Folders | None = None
_lock = threading.Lock()


def new_folder() -> tuple[Path, str]:
    """A new folder with work, home and tmp in it, and the mark of the processes that belong to it."""
    global _folders
    with _lock:
        if _folders is None or _folders.pid != os.getpid():  # a fork is another process
            _folders = _Folders()
        number = next(_folders.numbers)
        folder = _folders.parent / str(number)
        for name in ("work", "home", "tmp"):
            (folder / name).mkdir(parents=True)
        return folder, f"{_folders.mark}-{number}."
