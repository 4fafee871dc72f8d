"""A provider without a service: each of its sandboxes is a folder of this machine with an own HOME and TMPDIR.

The folders are in the folder that the variable FOLDER_SANDBOXES names, so that another process finds them, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokengrove.options.option import option
from tokengrove.rollout.sandboxes.cleaning import clean
from tokengrove.rollout.sandboxes.remote_sandbox import OWNER, RemoteSandbox
from tokengrove.rollout.sandboxes.remote_settings import RemoteSettings

PARENT = "FOLDER_SANDBOXES"
UNUSED = "folder-sandbox"


def made() -> list[Path]:
    """The folders of the sandboxes that exist."""
    return sorted(path.parent for path in Path(os.environ[PARENT]).glob("*/labels"))


class Busy(Exception):
    """An error that passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSettings(RemoteSettings):
    """Settings of a sandbox of the provider."""

    image: str | None = option(None, "Text of the file `image` in its HOME.")


class FolderSandbox(RemoteSandbox):
    """A sandbox of the provider."""

    extra = "folder"
    kind = FolderSettings
    settings: FolderSettings

    def connect(self) -> None:
        self.folder = Path(os.environ[PARENT]) / uuid.uuid4().hex

    def create(self, labels: Mapping[str, str]) -> None:
        for name in ("home", "tmp"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "home" / "image").write_text(str(self.settings.image))
        (self.folder / "labels").write_text(json.dumps(dict(labels)))

    def execute(self, script: str, env: Mapping[str, str]) -> tuple[int, str]:
        own = {"HOME": f"{self.folder}/home", "TMPDIR": f"{self.folder}/tmp", "PATH": os.environ["PATH"]}
        told = subprocess.run(
            ["/bin/sh", "-c", script],
            env={**own, **env},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            check=False,
        )
        return told.returncode, told.stdout.decode()

    def write(self, path: str, content: bytes) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)

    def read(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def delete(self) -> None:
        if self.folder.exists():
            delete(self.folder)

    def delete_all(self, owner: str) -> int:
        found = [each for each in made() if json.loads((each / "labels").read_text())[OWNER] == owner]
        for each in found:
            delete(each)
        return len(found)

    def is_transient(self, error: Exception) -> bool:
        return isinstance(error, Busy)


def delete(folder: Path) -> None:
    """End what works in the folder and remove it."""
    clean(str(folder), f"{UNUSED}-{folder.name}")
    shutil.rmtree(folder, ignore_errors=True)
