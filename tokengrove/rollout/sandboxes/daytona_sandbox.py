"""Sandboxes of Daytona. The key is in the variable DAYTONA_API_KEY; the SDK's other DAYTONA_* variables apply, too."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokengrove.errors import ConfigurationError
from tokengrove.options.option import option
from tokengrove.rollout.sandboxes.remote_sandbox import OWNER, RemoteSandbox
from tokengrove.rollout.sandboxes.remote_settings import RemoteSettings

_REQUEST_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class DaytonaSettings(RemoteSettings):
    """Settings of a sandbox of Daytona. CPU, memory and disk apply to an image; a snapshot has its own."""

    image: str | None = option(None, "Docker image.", otherwise="the default snapshot")
    snapshot: str | None = option(None, "Name of a snapshot.")
    cpu: int | None = option(None, "CPU cores, with an image.", least=1)
    memory_gib: int | None = option(None, "GiB of memory, with an image.", least=1)
    disk_gib: int | None = option(None, "GiB of disk, with an image.", least=1)
    user: str | None = option(None, "User of the commands.", otherwise="that of the image")


class DaytonaSandbox(RemoteSandbox):
    """A sandbox of Daytona (`daytona.Sandbox`), which is deleted as soon as it stops."""

    extra = "daytona"
    kind = DaytonaSettings
    settings: DaytonaSettings

    def connect(self) -> None:
        import daytona

        if not (os.environ.get("DAYTONA_API_KEY") or os.environ.get("DAYTONA_JWT_TOKEN")):
            raise ConfigurationError("DaytonaSandbox needs the variable DAYTONA_API_KEY")
        settings = self.settings
        if settings.image is not None and settings.snapshot is not None:
            raise ConfigurationError("give image or snapshot, not both")
        for name in ("cpu", "memory_gib", "disk_gib"):
            if getattr(settings, name) is not None and settings.image is None:
                raise ConfigurationError(f"{name} needs image: a snapshot has its own")
        self._sdk: Any = daytona
        self._sandbox: Any = None

    @property
    def _client(self) -> Any:
        return _client(*(os.environ.get(f"DAYTONA_{name}") for name in ("API_KEY", "JWT_TOKEN", "API_URL", "TARGET")))

    @property
    def _name(self) -> str:
        return f"tokengrove-{self._mark}"

    def create(self, labels: Mapping[str, str]) -> None:
        sdk, settings = self._sdk, self.settings
        common: dict[str, Any] = {
            "name": self._name,
            "labels": dict(labels),
            "os_user": settings.user,
            "ttl_minutes": math.ceil(settings.max_lifetime_s / 60),
            "auto_stop_interval": 0,  # otherwise a sandbox stops after a quarter of an hour without requests
            "ephemeral": True,
        }
        if settings.image is None:
            params = sdk.CreateSandboxFromSnapshotParams(snapshot=settings.snapshot, **common)
        else:
            resources = sdk.Resources(cpu=settings.cpu, memory=settings.memory_gib, disk=settings.disk_gib)
            params = sdk.CreateSandboxFromImageParams(image=settings.image, resources=resources, **common)
        try:
            self._sandbox = self._client.create(params, timeout=settings.startup_timeout)
        except sdk.DaytonaConflictError:  # an earlier request has created it, and its answer was lost
            self._sandbox = self._client.get(self._name)
            self._sandbox.wait_for_sandbox_start(timeout=settings.startup_timeout)

    def execute(self, script: str, env: Mapping[str, str]) -> tuple[int, str]:
        # The service returns both outputs as one.
        command = f"/bin/sh -c {shlex.quote(script)} 2>/dev/null"
        told = self._sandbox.process.exec(command, env=dict(env), timeout=_REQUEST_S)
        return told.exit_code, told.result

    def write(self, path: str, content: bytes) -> None:
        self._sandbox.fs.upload_file(content, path)

    def read(self, path: str) -> bytes:
        return bytes(self._sandbox.fs.download_file(path))

    def address(self, port: int) -> str | None:
        url: str = self._sandbox.create_signed_preview_url(port, int(self.settings.max_lifetime_s)).url
        return url

    def delete(self) -> None:
        try:
            sandbox = self._sandbox or self._client.get(self._name)  # a creation that failed may have left it
            sandbox.delete(timeout=_REQUEST_S)
        except self._sdk.DaytonaNotFoundError:
            pass

    def delete_all(self, owner: str) -> int:
        found = list(self._client.list(self._sdk.ListSandboxesQuery(labels={OWNER: owner})))
        for sandbox in found:
            with suppress(self._sdk.DaytonaNotFoundError, self._sdk.DaytonaConflictError):  # it is being deleted
                sandbox.delete(timeout=_REQUEST_S)
        return len(found)

    def is_transient(self, error: Exception) -> bool:
        sdk = self._sdk
        status = getattr(error, "status_code", None) or 0
        return isinstance(error, sdk.DaytonaConnectionError) or status == 429 or status >= 500


@cache
def _client(*account: str | None) -> Any:
    """The client of an account, which its sandboxes share. Its settings are those of the variables."""
    import daytona

    return daytona.Daytona()
