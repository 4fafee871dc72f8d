"""A file system without Python, for programs that carry their own: a C library, /bin/sh with a few commands, /tmp."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

COMMANDS = ("sh", "chmod", "find", "gzip", "id", "mkdir", "mktemp", "mv", "rm", "tail", "tar")
_LIBRARIES = ("libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libutil.so.1")
# In a namespace of its own, so that the mounts go with the process, which is the one that the test starts.
_ENTER = """
root=$1 mounts=$2
shift 2
mount -o rbind /proc "$root/proc" && mount -o bind /dev/null "$root/dev/null" && eval "$mounts" || exit 99
exec chroot "$root" "$@"
"""


class BareSystem:
    """The file system below `root`. Skips the test where it cannot be made or entered."""

    def __init__(self, root: Path) -> None:
        self.root = root
        busybox, unshare = shutil.which("busybox"), shutil.which("unshare")
        if busybox is None or unshare is None:
            pytest.skip("needs a static busybox and unshare: apt-get install busybox-static util-linux")
        for folder in ("bin", "dev", "proc", "tmp"):
            (root / folder).mkdir(parents=True)
        (root / "tmp").chmod(0o1777)
        (root / "dev" / "null").touch()
        shutil.copy(busybox, root / "bin" / "busybox")
        for name in COMMANDS:
            (root / "bin" / name).symlink_to("busybox")
        for path in self._c_library():
            target = root / path.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        tried = self.run("sh", "-c", "exit 0")
        if tried.returncode:
            pytest.skip(f"a file system of its own cannot be entered here: {tried.stderr.strip()}")

    def run(self, *command: str, mounts: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it until it ends. `mounts`: shell commands before that; `$root` is its path in them."""
        return subprocess.run(
            self.entered(command, mounts),
            env=self.environment(environment),
            capture_output=True,
            text=True,
            timeout=120,
        )

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command in it. The process is the command itself, without a parent in between."""
        pipe: Any = subprocess.PIPE
        return subprocess.Popen(
            self.entered(command), env=self.environment({}), stdout=pipe, stderr=subprocess.STDOUT, text=True, bufsize=1
        )

    def entered(self, command: tuple[str, ...], mounts: str = "") -> list[str]:
        space = ["unshare", "--user", "--map-root-user", "--mount", "/bin/sh", "-c", _ENTER, "sh"]
        return [*space, str(self.root), mounts, *command]

    @staticmethod
    def environment(more: Mapping[str, str]) -> dict[str, str]:
        return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **more}

    @staticmethod
    def _c_library() -> list[Path]:
        linked = subprocess.run(["ldd", "/bin/ls"], capture_output=True, text=True).stdout
        library, loader = re.search(r"libc\.so\.6 => (\S+)", linked), re.search(r"(/\S*/ld-linux\S+)", linked)
        if library is None or loader is None:
            pytest.skip("this system has no GNU C library")
        parts = [Path(library[1]).with_name(name) for name in _LIBRARIES]
        return [Path(loader[1]), *(path for path in parts if path.exists())]
