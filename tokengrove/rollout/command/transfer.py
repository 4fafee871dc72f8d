"""Moves the folders of an episode between this machine and a sandbox, as one archive."""

from __future__ import annotations

import io
import logging
import shutil
import tarfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tokengrove.rollout.command.failures import SHOWN, how_it_ended
from tokengrove.rollout.sandboxes import Sandbox
from tokengrove.rollout.threads import in_thread

_log = logging.getLogger(__name__)
_UNPACK = """
archive=$0
while [ $# -gt 0 ]; do
  mkdir -p "$2" && tar -xzf "$archive" -C "$2" --strip-components=1 "$1" || exit
  shift 2
done
rm -f "$archive"
"""
_LEVEL = 1  # a fast compression: most of the time goes into files that the network would carry as quickly


async def send(folders: Mapping[str, Path], sandbox: Sandbox, targets: Mapping[str, str]) -> None:
    """Copy the content of each folder to the path of the same name in the sandbox. Raises OSError if that fails."""
    packed = await in_thread(partial(_packed, folders), "tokengrove-sandbox-pack")
    archive = f"{sandbox.scratch_folder}/tokengrove-sent.tgz"
    await sandbox.upload(archive, packed)
    pairs = [word for name in folders for word in (name, targets[name])]
    await _done(sandbox, ["/bin/sh", "-c", _UNPACK, archive, *pairs])


async def fetch(sandbox: Sandbox, source: str, folder: Path) -> None:
    """Replace the content of a local folder with that of a folder in the sandbox.

    Links that lead out of the folder and special files are left out, and logged. Raises OSError if that fails, and
    ValueError for a compressed archive of more than DOWNLOAD_BYTES.
    """
    archive = f"{sandbox.scratch_folder}/tokengrove-fetched.tgz"
    await _done(sandbox, ["/bin/sh", "-c", 'tar -czf "$0" -C "$1" .', archive, source])
    packed = await sandbox.download(archive)
    await in_thread(partial(_unpack, packed, folder), "tokengrove-sandbox-unpack")


async def _done(sandbox: Sandbox, words: list[str]) -> None:
    told = await sandbox.run(words)
    if told.exit_code:
        raise OSError(f"tar {how_it_ended(told)} in the sandbox: {told.output[-SHOWN:].strip()}")


def _packed(folders: Mapping[str, Path]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=_LEVEL) as archive:
        for name, folder in folders.items():
            archive.add(folder, name, filter=_without_owner)
    return packed.getvalue()


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The entry without this machine's user, who may be another one in the sandbox."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _unpack(packed: bytes, folder: Path) -> None:
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
    left_out: list[str] = []

    def kept(entry: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        try:
            return tarfile.data_filter(entry, path)
        except tarfile.FilterError:
            left_out.append(entry.name)
            return None

    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        archive.extractall(folder, filter=kept)
    if left_out:
        _log.warning(
            "%d files of the sandbox lead out of its working folder or are special and were left out: %s",
            len(left_out),
            ", ".join(left_out[:3]),
        )
