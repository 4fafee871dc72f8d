"""Deletes the remote sandboxes of a process that has ended in any way, also if it was killed.

`python -m tokengrove.rollout.sandboxes.remote_cleaning CLASS SETTINGS OWNER` is started next to each process that has
such sandboxes. It waits for the end of its input, then deletes what has the label of its owner. The label finds more
than a list of ids: also a sandbox whose creation was underway when the process was killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from tokengrove import initial_block
from tokengrove.rollout.imports import load

_AGAIN_S = (0, 5, 30, 60)
"""The pauses before each look: a creation that was underway shows up later."""


class _Owner:
    """This process as the owner of sandboxes of one class. `label`: the value of their label."""

    def __init__(self, path: str, settings: str) -> None:
        self.pid = os.getpid()
        self.label = uuid.uuid4().hex
        # Its own session, because this process may be killed together with its process group.
        self.cleaner = subprocess.Popen(
            [sys.executable, "-m", __name__, path, settings, self.label],
            # With the caller's variables: it needs the provider's key. Modules of the caller are found as here.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


_owners: dict[tuple[str, str], _Owner] = {}
_lock = threading.Lock()


def owner_of(kind: type, settings: Mapping[str, Any]) -> str:
    """The label of this process's sandboxes of a class. A process that deletes them later runs when this returns."""
    path, text = f"{kind.__module__}:{kind.__qualname__}", json.dumps(settings, sort_keys=True)
    with _lock:
        owner = _owners.get((path, text))
        if owner is None or owner.pid != os.getpid() or owner.cleaner.poll() is not None:
            owner = _owners[path, text] = _Owner(path, text)
        return owner.label


def clean(delete: Callable[[], int]) -> None:
    """Call `delete`, which returns how many it has deleted, until it has found nothing twice in a row."""
    nothing = 0
    for pause_s in _AGAIN_S:
        time.sleep(pause_s)
        try:
            nothing = 0 if delete() else nothing + 1
        except Exception:
            nothing = 0  # the provider does not answer; its own limit of the lifetime remains
        if nothing == 2:
            return


def _main(path: str, settings: str, owner: str) -> None:
    initial_block.clear()  # the provider's key is readable by programs of the same user until then
    sandbox = load(path)(json.loads(settings))
    sys.stdin.buffer.read()  # ends when the process at the other end ends
    clean(lambda: int(sandbox.delete_all(owner)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
