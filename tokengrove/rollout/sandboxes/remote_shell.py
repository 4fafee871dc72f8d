"""A remote sandbox whose provider runs commands: files are written and read through their stdin and stdout."""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections.abc import Mapping

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.sandboxes.remote_sandbox import RemoteSandbox

REQUEST_S, TRANSFER_S = 60.0, 600.0
ALIVE = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"
"""The first process of a sandbox. As a shell it also reaps the processes that commands leave."""


class RemoteShell(RemoteSandbox):
    """A subclass implements `shell` in place of `execute`, `write` and `read`."""

    @abstractmethod
    def shell(self, script: str, stdin: bytes, limit_s: float) -> tuple[int, bytes, bytes]:
        """The exit code, stdout and stderr of a script that reads no more than `stdin`, whose end it does not see.

        Raises an exception after which the call is repeated if the script has not ended within `limit_s` seconds.
        """

    def execute(self, script: str, env: Mapping[str, str]) -> tuple[int, str]:
        # Both go through stdin: arguments are visible in the sandbox, and in the logs of Kubernetes.
        for name in env:
            if not (name.isascii() and name.isidentifier()):
                raise ConfigurationError(f"{name!r} cannot be the name of a variable in a sandbox of {self.extra}")
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
        given = f"{exports}{script}".encode()
        code, out, err = self.shell(f'eval "$(head -c {len(given)})"', given, REQUEST_S)
        return code, (out if code == 0 else out + err).decode(errors="replace")

    def write(self, path: str, content: bytes) -> None:
        name = shlex.quote(path)
        self._done(f'mkdir -p "$(dirname {name})" && head -c {len(content)} >{name}', content)

    def read(self, path: str) -> bytes:
        return self._done(f"cat {shlex.quote(path)}")

    def _done(self, script: str, stdin: bytes = b"") -> bytes:
        code, out, err = self.shell(script, stdin, TRANSFER_S)
        if code:
            raise RuntimeError(f"a command in the sandbox exited with {code}: {err.decode(errors='replace')[-500:]}")
        return out
