"""The files of the page and their headers: no script, style or request but the server's own, and no frame around it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_STATIC = Path(__file__).parent / "static"
_IMPORT_MAP = re.compile(r'<script type="importmap">(.*?)</script>', re.DOTALL)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    "": "text/plain; charset=utf-8",  # licences
}
_POLICY = (
    "default-src 'none'; script-src 'self' 'sha256-{}'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is and compressed, its entity tag without quotes, and the headers that it is sent with."""

    content: bytes
    compressed: bytes
    tag: str
    headers: Mapping[str, str]


@cache
def page_files(folder: Path = _STATIC) -> Mapping[str, PageFile]:
    """All files by their path below the folder, with slashes; `index.html` is the page itself. Read once."""
    policy = _policy((folder / "index.html").read_text(encoding="utf-8"))
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in _TYPES)
    return {path.relative_to(folder).as_posix(): _file(path, policy) for path in found}


def _policy(page: str) -> str:
    """The content security policy: the import map is the only script within the page."""
    (within,) = _IMPORT_MAP.findall(page)
    return _POLICY.format(base64.b64encode(hashlib.sha256(within.encode()).digest()).decode())


def _file(path: Path, policy: str) -> PageFile:
    content = path.read_bytes()
    headers = {
        "content-type": _TYPES[path.suffix],
        "cache-control": "no-cache",  # asked for again with the tag: a new version of the server has new files
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }
    return PageFile(content, gzip.compress(content, mtime=0), hashlib.sha256(content).hexdigest()[:32], headers)
