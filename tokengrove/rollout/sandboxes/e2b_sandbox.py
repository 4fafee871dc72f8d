"""Sandboxes of E2B. The key is in the variable E2B_API_KEY, and the other E2B_* variables of the SDK apply.

CPU and memory are those of the template.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokengrove.errors import ConfigurationError
from tokengrove.options.option import option
from tokengrove.rollout.sandboxes.remote_sandbox import OWNER, RemoteSandbox
from tokengrove.rollout.sandboxes.remote_settings import RemoteSettings

_TRANSFER_S = 600.0
"""Seconds within which a file must have been transferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class E2BSettings(RemoteSettings):
    """Settings of a sandbox of E2B."""

    template: str | None = option(None, "Name or id of the template.", otherwise="base")
    user: str | None = option(None, "User of the commands.", otherwise="that of the template")
    allow_internet_access: bool = option(True, "Whether the sandbox reaches the internet.")


class E2BSandbox(RemoteSandbox):
    """A sandbox of E2B (`e2b.Sandbox`)."""

    extra = "e2b"
    kind = E2BSettings
    settings: E2BSettings

    def connect(self) -> None:
        import e2b

        if not os.environ.get("E2B_API_KEY"):
            raise ConfigurationError("E2BSandbox needs the variable E2B_API_KEY")
        self._sdk: Any = e2b
        self._sandbox: Any = None

    def create(self, labels: Mapping[str, str]) -> None:
        settings = self.settings
        self._sandbox = self._sdk.Sandbox.create(
            settings.template,
            timeout=int(settings.max_lifetime_s),
            metadata=dict(labels),
            allow_internet_access=settings.allow_internet_access,
            request_timeout=settings.startup_timeout,
            idempotency_key=self._mark,  # a repeated request creates no second sandbox
        )

    def execute(self, script: str, env: Mapping[str, str]) -> tuple[int, str]:
        try:
            told = self._sandbox.commands.run(script, envs=dict(env), user=self.settings.user, timeout=60)
        except self._sdk.CommandExitException as error:
            return error.exit_code, error.stdout + error.stderr
        return told.exit_code, told.stdout

    def write(self, path: str, content: bytes) -> None:
        user = self.settings.user
        self._sandbox.files.write(path, content, user=user, use_octet_stream=True, request_timeout=_TRANSFER_S)

    def read(self, path: str) -> bytes:
        user = self.settings.user
        return bytes(self._sandbox.files.read(path, format="bytes", user=user, request_timeout=_TRANSFER_S))

    def address(self, port: int) -> str | None:
        return f"https://{self._sandbox.get_host(port)}"

    def delete(self) -> None:
        if self._sandbox is not None:
            self._sandbox.kill()

    def delete_all(self, owner: str) -> int:
        pages = self._sdk.Sandbox.list(query=self._sdk.SandboxQuery(metadata={OWNER: owner}))
        found: list[str] = []
        while pages.has_next:
            found += [each.sandbox_id for each in pages.next_items()]
        for sandbox_id in found:
            self._sdk.Sandbox.kill(sandbox_id)
        return len(found)

    def is_transient(self, error: Exception) -> bool:
        sdk = self._sdk
        kinds = (sdk.RateLimitException, sdk.TimeoutException, sdk.exceptions.ServiceBusyException)
        status = getattr(error, "status_code", None) or 0
        gone = isinstance(error, sdk.exceptions.SandboxNotRunningException)
        return not gone and (isinstance(error, kinds) or status >= 500 or _is_of_transport(error))


def _is_of_transport(error: Exception) -> bool:
    import httpx

    return isinstance(error, httpx.TransportError)
