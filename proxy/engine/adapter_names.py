"""The names of LoRA adapters on engines, which key their prefix caches by name: no name is used for other weights."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_DIGITS = 8


def adapter_name(version: int, digest: str | None) -> str:
    """The name of an adapter. `digest`: that of its contents; None if they cannot be read, then the name is random."""
    return f"tokengrove-v{version}-{digest or secrets.token_hex(_DIGITS // 2)}"


def is_named_by(name: str, digest: str | None) -> bool:
    """True if a name may be that of an adapter with this digest: it is, or the digest is unknown."""
    return digest is None or name.endswith(f"-{digest}")


def adapter_digest(path: str) -> str | None:
    """8 hex digits of the contents and the path of an adapter's folder; None if this machine cannot read it.

    A server may read the folder again later, so an equal adapter in another folder has another name.
    """
    total = hashlib.sha256(path.encode())
    try:
        for file in (Path(path, name) for name in _FILES):
            if file.is_file():
                with file.open("rb") as content:
                    total.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
        readable = Path(path, _FILES[0]).is_file()
    except OSError:
        return None
    return total.hexdigest()[:_DIGITS] if readable else None
