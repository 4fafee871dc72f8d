"""The files of an archive, on any file system that fsspec knows. A file is written whole or not at all.

A local file is on the disk, under its name, when `writing` ends. An object store makes an object visible when its
upload is complete; after an error the upload is aborted.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from tokengrove.errors import ConfigurationError, how_to_get

_PART = ".part"


def folder_url(given: str) -> str:
    """The URL of a folder: of a local path, its absolute path as file://. Raises ConfigurationError."""
    fs, path = _opened(given)
    if _is_local(fs):
        path = os.path.realpath(path)
    return str(fs.unstrip_protocol(path)).rstrip("/")


def new_file(folder: str) -> str:
    """The URL of a file that does not exist yet, in the folder with this URL."""
    return f"{folder}/sessions-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:12]}.parquet"


@contextmanager
def writing(url: str) -> Iterator[IO[bytes]]:
    """Write a file, which is private to its owner on a local disk. It exists when the block has ended without an error.

    Raises ConfigurationError.
    """
    fs, path = _opened(url)
    local = _is_local(fs)
    part = path + _PART if local else path
    try:
        if local:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            _sync_folder(path)
        else:
            with _uploading(fs, path) as file:
                yield file
    except OSError as error:
        raise _failed(url, "written", error) from None


@contextmanager
def reading(url: str) -> Iterator[IO[bytes]]:
    """Open a file. Raises ConfigurationError."""
    fs, path = _opened(url)
    try:
        with _only_os_errors():
            file: Any = fs.open(path, "rb")
    except OSError as error:
        raise _failed(url, "read", error) from None
    with file:
        opened: Any = file if _is_local(fs) else _RemoteFile(file)
        yield opened


def remove(url: str) -> None:
    """Delete a file and what a crash left of writing it. A file that is gone is no error. Raises ConfigurationError."""
    fs, path = _opened(url)
    for each in (path, path + _PART) if _is_local(fs) else (path,):
        try:
            with _only_os_errors():
                fs.rm_file(each)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _failed(url, "deleted", error) from None
    if _is_local(fs) and os.path.isdir(os.path.dirname(path)):
        _sync_folder(path)


@contextmanager
def _uploading(fs: Any, path: str) -> Iterator[Any]:
    """Write an object, which is not created if the block ends with an error."""
    with _only_os_errors():
        file = fs.open(path, "wb")
    try:
        yield _RemoteFile(file)
    except BaseException:
        _abort(file)
        raise
    with _only_os_errors():
        file.close()


def _abort(file: Any) -> None:
    """Abort an upload, which closing the file would complete."""
    from fsspec.spec import AbstractBufferedFile

    if isinstance(file, AbstractBufferedFile):
        file.closed = True  # also keeps the garbage collector from completing it
        with suppress(Exception):  # the block's error is the cause
            file.discard()


class _RemoteFile:
    """A file of fsspec, of which every error is an OSError."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        return _only_os_errors()(found) if callable(found) else found


@contextmanager
def _only_os_errors() -> Iterator[None]:
    """Raise any error as an OSError: the libraries of object stores also raise errors of their own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _opened(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigurationError(f"an archive needs fsspec: {how_to_get('tokengrove[archive]')}") from None
    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:  # no such protocol, or its library is not installed
        raise ConfigurationError(f"the archive {url} cannot be opened: {error}") from None
    return fs, path


def _is_local(fs: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)


def _sync_folder(path: str) -> None:
    """Let the name of a file, or its absence, outlast a loss of power."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _failed(url: str, verb: str, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"the archive file {url} cannot be {verb}: {error.strerror or error}")
