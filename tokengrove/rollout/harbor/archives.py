"""Copies folders into an environment and out of it as tar archives.

An agent may have made the archives that come out, so only regular files and folders below the target are written.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import IO, Self

# Headers have names and times of a file, and are read into memory as a whole.
_MOST_HEADER_BYTES = 2**20
_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
_Filter = Callable[[tarfile.TarInfo], tarfile.TarInfo]


def pack(entries: Iterable[tuple[Path, str]], file: IO[bytes], mode: int | None = None) -> None:
    """Write files and folders, with their contents, to `file` under the given names, as files of root.

    A link within its own entry stays a link. Other links are replaced with their targets, and links to a parent folder
    are omitted. `mode`: the mode of all files; None: their own modes.
    """
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for source, name in entries:
            _pack(tar, source, name.strip("/") or ".", source.resolve(), _as_root(mode))


class _Member(tarfile.TarInfo):
    """A member of an archive with headers of limited size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type in _HEADERS and found.size > _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header has {found.size} bytes; the limit is {_MOST_HEADER_BYTES}")
        return found


def unpack(file: IO[bytes], target: Path, name: str | None = None) -> None:
    """Write the members of `file` below `target`. `name`: the name of the archive's only file.

    Links, devices, sparse files and names that lead out of `target` are omitted. Raises ValueError for data that is not
    an archive, for a compressed archive, whose size would not be limited, for a header that is too large, and for files
    that cannot be written.
    """
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as tar:
            for member in tar:
                if _below(member.name):
                    _unpack(tar, member, target / (name or member.name))
    except tarfile.TarError as error:
        raise ValueError(f"the environment returned an invalid archive: {error}") from error
    except OSError as error:  # such as a file in the place of a folder
        raise ValueError(f"files of the environment cannot be written: {error}") from error


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
        return  # a link to one of its parent folders
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
