"""Makes a room on this machine and keeps running as its first process: `python room_init.py ORDER`.

A room has its own processes and its own view of the files: it has its own folders such as /app and /tests, and its
changes to system folders are not visible outside, or the folders are read-only. It needs Linux and user namespaces, but
not root. ORDER is a JSON file: `folder` (an empty folder of this machine), `hidden` (folders that are empty in the
room) and `kept` (paths in hidden folders that are shown nevertheless, read-only). When the room is ready, its process
id is written to stdout, otherwise a line that begins with `error: `. The room ends, with all its processes, when stdin
ends.

It imports only the standard library, to start fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
from pathlib import Path

_NEW = 0x00020000 | 0x08000000 | 0x10000000 | 0x20000000  # mounts, ipc, users, processes
_BIND, _REC, _PRIVATE = 0x1000, 0x4000, 0x40000
_DETACH, _RDONLY, _RECURSIVE, _AT_FDCWD, _MOUNT_SETATTR = 2, 1, 0x8000, -100, 442
_PR_SET_PDEATHSIG = 1
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
_OWN = ("proc", "dev", "sys", "lost+found")
_libc = ctypes.CDLL(None, use_errno=True)


def main(order: str) -> None:
    """Make the room, print its process id, and wait for its end in a child, which is the first process of the room."""
    given = json.loads(Path(order).read_text())
    os.umask(0o022)
    _enter_namespaces()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        _first_process(given, tell)
    os.close(tell)
    sys.stdin.close()
    with os.fdopen(told) as pipe:
        problem = pipe.read()
    print(f"error: {problem}" if problem else child, flush=True)
    os.close(1)
    os.waitpid(child, 0)


def _enter_namespaces() -> None:
    user, group = os.geteuid(), os.getegid()
    try:
        _check(_libc.unshare(_NEW), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError as error:
        print(f"error: user namespaces are not allowed here: {error}", flush=True)
        sys.exit(1)


def _first_process(given: dict[str, object], tell: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        _build(Path(str(given["folder"])), _paths(given["hidden"]), _paths(given["kept"]))
    except OSError as error:
        os.write(tell, f"the files of the room cannot be set up: {error}".encode())
        os._exit(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    signal.signal(signal.SIGCHLD, _reap)
    os.close(tell)
    while os.read(0, 4096):
        pass
    os._exit(0)


def _reap(*_: object) -> None:
    """Collect the exit codes of processes whose parents have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _paths(value: object) -> list[Path]:
    assert isinstance(value, list)
    return [Path(str(each)) for each in value]


def _build(folder: Path, hidden: list[Path], kept: list[Path]) -> None:
    """Mount the files of the room in `folder`/root, and make that the root folder."""
    _mount(None, Path("/"), None, _REC | _PRIVATE)
    root = folder / "root"
    root.mkdir()
    _mount(root, root, None, _BIND)
    for number, path in enumerate(sorted(Path("/").iterdir())):
        if path.name not in _OWN:
            _add(path, root, folder / "layers" / str(number), path in hidden)
    _devices(root / "dev")
    for number, path in enumerate(path for path in hidden if len(path.parts) > 2):
        _hide(path, root, folder / "hidden" / str(number))
    _resolver(root)
    for path in kept:
        _keep(path, root)
    for name in ("tmp", "var/tmp", "run"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "sys").mkdir()
    (root / "proc").mkdir()
    _mount(Path("proc"), root / "proc", "proc", 0)
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount")
    os.chdir("/")


def _add(path: Path, root: Path, layer: Path, hidden: bool) -> None:
    """Show a folder or link of the machine's root: as a copy-on-write overlay if possible, otherwise read-only."""
    seen = root / path.name
    if path.is_symlink():
        seen.symlink_to(path.readlink())
        return
    if not path.is_dir():
        return
    seen.mkdir()
    if hidden:
        return
    upper, work = layer / "upper", layer / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    upper.chmod(path.stat().st_mode & 0o7777)
    try:
        _mount(Path("overlay"), seen, "overlay", 0, f"lowerdir={path},upperdir={upper},workdir={work},userxattr")
    except OSError:  # overlays are not supported, or the folder has other file systems
        _read_only(path, seen)


def _hide(path: Path, root: Path, empty: Path) -> None:
    """Mount an empty folder over a folder below the top level."""
    seen = root / path.relative_to("/")
    if seen.is_dir() and not seen.is_symlink():
        empty.mkdir(parents=True)
        _mount(empty, seen, None, _BIND)


def _keep(path: Path, root: Path) -> None:
    seen = root / path.relative_to("/")
    if not os.path.exists(path) or seen.exists():  # not `path.exists`, which raises without permission
        return
    if path.is_symlink() or path.is_file():
        seen.parent.mkdir(parents=True, exist_ok=True)
        seen.touch()
        path = path.resolve()
    else:
        seen.mkdir(parents=True)
    _read_only(path, seen)


def _read_only(path: Path, seen: Path) -> None:
    _mount(path, seen, None, _BIND | _REC)
    attributes = (ctypes.c_uint64 * 4)(_RDONLY, 0, 0, 0)
    name = ctypes.c_char_p(os.fsencode(seen))
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    done = _libc.syscall(ctypes.c_long(_MOUNT_SETATTR), _AT_FDCWD, name, _RECURSIVE, ctypes.byref(attributes), size)
    _check(done, f"read-only {seen}")


def _resolver(root: Path) -> None:
    """Copy the addresses of the name servers, which are often in a folder that the room hides."""
    file = Path("/etc/resolv.conf")
    if file.is_symlink() and file.exists():
        copy = root / file.resolve().relative_to("/")
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def _devices(folder: Path) -> None:
    folder.mkdir()
    _mount(Path("tmpfs"), folder, "tmpfs", 0, "mode=755")
    for name in _DEVICES:
        if Path("/dev", name).exists():
            (folder / name).touch()
            _mount(Path("/dev", name), folder / name, None, _BIND)
    for name, target in _LINKS.items():
        (folder / name).symlink_to(target)
    (folder / "shm").mkdir(0o1777)
    (folder / "pts").mkdir()
    _mount(Path("devpts"), folder / "pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=620")


def _mount(source: Path | None, target: Path, kind: str | None, flags: int, options: str | None = None) -> None:
    words = (None if word is None else os.fsencode(word) for word in (source, target, kind))
    done = _libc.mount(*words, ctypes.c_ulong(flags), None if options is None else os.fsencode(options))
    _check(done, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main(sys.argv[1])
