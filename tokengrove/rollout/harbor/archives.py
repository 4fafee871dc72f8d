"""Folders as tar archives, on their way into an environment and out of it.

What comes out was made by an agent: of it, only plain files and folders below the target are written.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import IO, Self

# Names and times of a file, which are read into memory whole.
_MOST_HEADER_BYTES = 2**20
_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
_Filter = Callable[[tarfile.TarInfo], tarfile.TarInfo]


def pack(entries: Iterable[tuple[Path, str]], file: IO[bytes], mode: int | None = None) -> None:
    """Write files and folders (whose contents come along) to `file` under the names given, as files of root.

    A link stays one if it leads to a place in its own entry; else what it leads to is packed. `mode` is given to all.
    """
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for source, name in entries:
            _pack(tar, source, name.strip("/") or ".", source.resolve(), _as_root(mode))


class _Member(tarfile.TarInfo):
    """A member of an archive, whose own headers are of bounded size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type in _HEADERS and found.size > _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {found.size} bytes; at most {_MOST_HEADER_BYTES} are read")
        return found


def unpack(file: IO[bytes], target: Path, name: str | None = None) -> None:
    """Write what `file` has below `target`, as `name` if that is given for its only file.

    Links, devices, files with holes and names that lead elsewhere are left out. Raises ValueError for what is no
    archive, for a compressed one, which could hold far more than it seems to, for one with a huge header, and for what
    cannot be written.
    """
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as tar:
            for member in tar:
                if _below(member.name):
                    _unpack(tar, member, target / (name or member.name))
    except tarfile.TarError as error:
        raise ValueError(f"what came out of the environment is no archive: {error}") from error
    except OSError as error:  # such as a file below one that is no folder
        raise ValueError(f"what came out of the environment cannot be written: {error}") from error


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
    elif member.isreg() and not member.issparse() and (content := tar.extractfile(member)) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as written:
            shutil.copyfileobj(content, written)
        path.chmod(0o755 if member.mode & 0o100 else 0o644)


def _pack(tar: tarfile.TarFile, path: Path, name: str, root: Path, changed: _Filter) -> None:
    inside = path.resolve()
    link = path.is_symlink() and path != root and inside.is_relative_to(root)
    if path.is_symlink() and path.parent.resolve().is_relative_to(inside):
        return  # leads to a folder that it lies in
    tar.dereference = not link
    tar.add(path, name, recursive=False, filter=changed)
    if path.is_dir() and not link:
        for each in sorted(path.iterdir()):
            _pack(tar, each, f"{name}/{each.name}", root, changed)


def _as_root(mode: int | None) -> _Filter:
    def changed(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        info.mode = info.mode if mode is None else mode
        return info

    return changed


def _below(name: str) -> bool:
    path = PurePosixPath(os.path.normpath(name))
    return not path.is_absolute() and ".." not in path.parts
