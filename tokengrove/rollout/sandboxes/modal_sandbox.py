"""Sandboxes of Modal. The key is in the variables MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or in ~/.modal.toml.

The other MODAL_* variables of the SDK apply. Commands go to the worker of a sandbox, not through Modal's own servers.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tokengrove.errors import ConfigurationError
from tokengrove.options.option import option
from tokengrove.rollout.sandboxes.remote_sandbox import OWNER
from tokengrove.rollout.sandboxes.remote_settings import RemoteSettings
from tokengrove.rollout.sandboxes.remote_shell import ALIVE, RemoteShell

_FRAME = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalSettings(RemoteSettings):
    """Settings of a sandbox of Modal. Its requests of CPU and memory are also its limits."""

    app: str = option("tokengrove", "App of the sandboxes, which is created if it is missing.")
    image: str | None = option(None, "Docker image.", otherwise="Modal's Debian with Python")
    published_image: str | None = option(None, "Name of an image that `modal.Image.publish` has published.")
    cpu: float | None = option(None, "CPU cores.", above=0)
    memory_gib: float | None = option(None, "GiB of memory.", above=0)


class ModalSandbox(RemoteShell):
    """A sandbox of Modal (`modal.Sandbox`)."""

    extra = "modal"
    kind = ModalSettings
    account = ("app",)
    settings: ModalSettings

    def connect(self) -> None:
        import modal

        config = modal.config.config
        if not (config["token_id"] or config["oauth_refresh_token"] or os.environ.get("MODAL_IS_REMOTE") == "1"):
            raise ConfigurationError(
                "ModalSandbox needs the variables MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or ~/.modal.toml"
            )
        if self.settings.image is not None and self.settings.published_image is not None:
            raise ConfigurationError("give image or published_image, not both")
        self._sdk: Any = modal
        self._sandbox: Any = None

    @property
    def _name(self) -> str:
        return f"tokengrove-{self._mark}"

    def _app(self) -> Any:
        return self._sdk.App.lookup(self.settings.app, create_if_missing=True)

    def create(self, labels: Mapping[str, str]) -> None:
        asyncio.run(self._started(self._app(), labels))

    async def _started(self, app: Any, labels: Mapping[str, str]) -> None:
        """Create the sandbox within the limit, which the SDK's blocking calls do not have."""
        limit_s = self.settings.startup_timeout
        try:
            async with asyncio.timeout(limit_s) as limit:
                self._sandbox = await self._created(app, labels)
                command = await self._sandbox.exec.aio("/bin/sh", "-c", ":")
                await command.wait.aio()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RuntimeError(f"the sandbox {self._name} has not started within {limit_s:g} s") from error

    async def _created(self, app: Any, labels: Mapping[str, str]) -> Any:
        sdk, settings = self._sdk, self.settings
        memory_mib = None if settings.memory_gib is None else math.ceil(settings.memory_gib * 1024)
        try:
            return await sdk.Sandbox.create.aio(
                *("/bin/sh", "-c", ALIVE),
                app=app,
                name=self._name,
                tags=dict(labels),
                image=self._image(),
                timeout=int(settings.max_lifetime_s),
                cpu=None if settings.cpu is None else (settings.cpu, settings.cpu),
                memory=None if memory_mib is None else (memory_mib, memory_mib),
            )
        except sdk.exception.AlreadyExistsError:  # an earlier request has created it, and its answer was lost
            return await sdk.Sandbox.from_name.aio(settings.app, self._name)

    def _image(self) -> Any:
        settings = self.settings
        if settings.published_image is not None:
            return self._sdk.Image.from_name(settings.published_image)
        if settings.image is not None:
            # An entrypoint would get the first process as its arguments.
            return self._sdk.Image.from_registry(settings.image, setup_dockerfile_commands=["ENTRYPOINT []"])
        return None

    def shell(self, script: str, stdin: bytes, limit_s: float) -> tuple[int, bytes, bytes]:
        command = self._sandbox.exec("/bin/sh", "-c", script, timeout=int(limit_s), text=False)
        with suppress(self._sdk.exception.ConflictError):  # it has ended without reading its input; its code says why
            for at in range(0, len(stdin), _FRAME):
                command.stdin.write(stdin[at : at + _FRAME])
                command.stdin.drain()
        out, code = command.stdout.read(), command.wait()
        if code == -1:  # the output ended without an error, too
            raise self._sdk.exception.ExecTimeoutError(f"a command has not ended within {limit_s:g} s")
        return code, out, command.stderr.read() if code else b""

    def delete(self) -> None:
        sdk = self._sdk
        with suppress(sdk.exception.NotFoundError):
            # A creation that failed may have left it.
            sandbox = self._sandbox or sdk.Sandbox.from_name(self.settings.app, self._name)
            sandbox.terminate()
            sandbox.detach()

    def delete_all(self, owner: str) -> int:
        sdk = self._sdk
        found = list(sdk.Sandbox.list(app_id=self._app().app_id, tags={OWNER: owner}))
        for sandbox in found:
            with suppress(sdk.exception.NotFoundError):  # it has just ended
                sandbox.terminate()
        return len(found)

    def is_transient(self, error: Exception) -> bool:
        told = self._sdk.exception
        kinds = (told.ServiceError, told.InternalError, told.ResourceExhaustedError, told.TimeoutError)
        # What ends a connection is passed on from the library below the SDK.
        below = type(error).__module__.startswith(("grpclib", "h2"))
        return isinstance(error, (*kinds, told.ConnectionError, OSError)) or below
