"""The files of the page and their headers: no script, style or request but the server's own, and no frame around it.

The page names its files below `ui/@VERSION/`, where the version is a digest of all of them: a browser keeps them for
good, and a page never runs with files of another version of the server.
"""

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
_WANTED_FIRST = re.compile(r"app\.js|(frame|lib)/[\w/]+\.js|vendor/(preact|preact-hooks|htm)/[\w/]+\.mjs")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    "": "text/plain; charset=utf-8",  # licences
}
_POLICY = (
    "default-src 'none'; script-src 'self' 'sha256-{}'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
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


@dataclass(frozen=True, slots=True)
class PageFiles:
    """All files by their path below the folder, with slashes, and their version. `index.html` is the page itself."""

    files: Mapping[str, PageFile]
    version: str


@cache
def page_files(folder: Path = _STATIC) -> PageFiles:
    """The files of the page. They are read once."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in _TYPES)
    contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
    version = _digest(b"".join(hashlib.sha256(content).digest() for content in contents.values()))[:16]
    page = _versioned(contents["index.html"].decode(), version, _wanted_first(list(contents)))
    policy = _policy(page)
    contents["index.html"] = page.encode()
    return PageFiles({name: _file(name, content, policy) for name, content in contents.items()}, version)


def _wanted_first(names: list[str]) -> list[str]:
    """The scripts that every view needs: the browser asks for all of them at once, not for each as it finds it."""
    return [name for name in names if _WANTED_FIRST.fullmatch(name)]


def _versioned(page: str, version: str, first: list[str]) -> str:
    """The page with the addresses of its files, and with links to the scripts that it will need."""
    links = "".join(f'    <link rel="modulepreload" href="ui/{name}">\n' for name in first)
    return (
        page.replace("  </head>", f"{links}  </head>")
        .replace('"ui/', f'"ui/@{version}/')
        .replace('"./ui/', f'"./ui/@{version}/')
    )


def _policy(page: str) -> str:
    """The content security policy: the import map is the only script within the page."""
    (within,) = _IMPORT_MAP.findall(page)
    return _POLICY.format(base64.b64encode(hashlib.sha256(within.encode()).digest()).decode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _file(name: str, content: bytes, policy: str) -> PageFile:
    headers = {
        "content-type": _TYPES[Path(name).suffix],
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }
    return PageFile(content, gzip.compress(content, mtime=0), _digest(content)[:32], headers)
