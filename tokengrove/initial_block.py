"""Removes secrets from the initial environment block of this process.

`/proc/PID/environ` shows that block to every process of the same user, such as an agent that a run starts as a command.
`clear` overwrites the secrets in the block and leaves `os.environ` unchanged, also for C libraries. `hold` removes the
keys of this server from `os.environ`, so that no child process gets them; `environment` still has them, for the
settings. On systems without /proc, nothing is overwritten.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress

_OURS = "TOKENGROVE_"
_NAME = re.compile("KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|DSN|PRIVATE|CERT|HEADERS", re.IGNORECASE)
_VALUE = re.compile("://[^/@]*:[^@]*@|[?&](password|sslpassword|token|key)=", re.IGNORECASE)
_ENV_START, _ENV_END = 47, 48  # in /proc/self/stat, counted from the state, which follows the program's name
_PUBLIC = {"PWD", "OLDPWD"}

_held: dict[str, str] = {}
_own: list[int] = []
"""The processes that called `clear`. A command that runs inside another program leaves its variables unchanged."""


def is_secret(name: str, value: str) -> bool:
    """Whether a variable may contain a secret, judging by its name or by a URL with a password."""
    return name not in _PUBLIC and bool(_NAME.search(name) or _VALUE.search(value))


def clear() -> None:
    """Overwrite the secrets in the initial block of this process. Call it before the first thread starts."""
    _own.append(os.getpid())
    for name, value in os.environ.items():
        if is_secret(name, value):
            os.putenv(name, value)  # libc now has its own copy, outside the block
    with suppress(Exception):  # a system without /proc, or with a hidden one
        _overwrite()


def hold() -> None:
    """Remove this server's keys from `os.environ`, if this process is a command."""
    if os.getpid() not in _own:
        return
    for name in [name for name in os.environ if name.startswith(_OURS)]:
        if is_secret(name, os.environ[name]):
            _held[name] = os.environ.pop(name)


def environment() -> Mapping[str, str]:
    """The variables of this process, including held keys."""
    return {**_held, **os.environ}


def without_secrets() -> Mapping[str, str]:
    """The variables of this process without secrets, for child processes."""
    return {name: value for name, value in os.environ.items() if not is_secret(name, value)}


def _overwrite() -> None:
    import ctypes

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    with open("/proc/self/environ", "rb") as file:
        block = file.read()
    if not start or len(block) != end - start:
        return
    at = start
    for entry in block.split(b"\0"):
        name, given, value = entry.partition(b"=")
        if given and is_secret(os.fsdecode(name), os.fsdecode(value)):
            ctypes.memset(at + len(name) + 1, ord("*"), len(value))
        at += len(entry) + 1
