"""The folders of this process's sandboxes. They are removed when the process ends, in any way."""

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
    """The folders of one process. `parent`: their parent folder. `mark`: the prefix of the marks of its sandboxes."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.mark = uuid.uuid4().hex
        self.parent = Path(tempfile.mkdtemp(prefix="tokengrove-sandboxes-")).resolve()
        self.numbers = itertools.count()
        command = [sys.executable, "-E", "-S", cleaning.__file__, str(self.parent), self.mark]
        # Its own session, because this process may be killed together with its process group.
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
    """A new folder with work, home and tmp, and the mark of its processes."""
    global _folders
    with _lock:
        if _folders is None or _folders.pid != os.getpid():  # a fork needs its own folders
            _folders = _Folders()
        number = next(_folders.numbers)
        folder = _folders.parent / str(number)
        for name in ("work", "home", "tmp"):
            (folder / name).mkdir(parents=True)
        return folder, f"{_folders.mark}-{number}."
