"""`/`, `/ui` and the files below `/ui/`. They need no key: they hold nothing, and what they show is read with one.

`/` is the page for browsers only. Agents and health checks that call it get the same JSON error as without a page.
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

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

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


_TAG = re.compile(r'(?:W/)?"([^"]*)"')
_VERSIONED = re.compile(r"(?:@(\w+)/)?(.*)", re.DOTALL)
_KEPT = "public, max-age=31536000, immutable"
_ASKED_AGAIN = "no-cache"
_REFUSED = re.compile(r"q=0(\.0*)?$")


class PageEndpoints:
    """Serves the files of the page from memory."""

    def __init__(self) -> None:
        self._page = page_files()

    async def root(self, request: Request) -> Response:
        """The page, for who accepts HTML by name. Raises HTTPException 404 for others."""
        if "text/html" not in _listed(request, "accept"):
            raise HTTPException(404)
        response = self._send("index.html", request)
        response.headers.add_vary_header("accept")
        return response

    async def page(self, request: Request) -> Response:
        """The page itself."""
        return self._send("index.html", request)

    async def page_above(self, request: Request) -> Response:
        """Sends `/ui/` on to `/ui`, from where the addresses within the page lead to its files, also below a prefix."""
        return Response(status_code=308, headers={"location": "../ui"})

    async def file(self, request: Request) -> Response:
        """A file of the page, with or without the version before its name. Raises HTTPException 404 for other names.

        A file of another version, which another server of a group may have named, is the one of here, and not kept.
        """
        version, name = _VERSIONED.fullmatch(request.path_params["file"]).groups()  # type: ignore[union-attr]
        return self._send(name, request, _KEPT if version == self._page.version else _ASKED_AGAIN)

    def _send(self, name: str, request: Request, caching: str = _ASKED_AGAIN) -> Response:
        file = self._page.files.get(name)
        if file is None:
            raise HTTPException(404)
        return _answer(file, request, caching)


def _answer(file: PageFile, request: Request, caching: str) -> Response:
    """The file, compressed if the client takes that; 304 without content if the client has it already."""
    zipped = "gzip" in _listed(request, "accept-encoding")
    headers = {
        **file.headers,
        "cache-control": caching,
        "vary": "accept-encoding",
        "etag": f'"{file.tag}-gzip"' if zipped else f'"{file.tag}"',
    }
    had = [tag.removesuffix("-gzip") for tag in _TAG.findall(request.headers.get("if-none-match", ""))]
    if file.tag in had:
        return Response(status_code=304, headers=headers)
    if zipped:
        return Response(file.compressed, headers={**headers, "content-encoding": "gzip"})
    return Response(file.content, headers=headers)


def _listed(request: Request, header: str) -> set[str]:
    """The values in a header of a request, in lower case, without those that it refuses (`q=0`)."""
    entries = [entry.strip().lower() for entry in ",".join(request.headers.getlist(header)).split(",")]
    parts = [entry.partition(";") for entry in entries]
    return {value.strip() for value, _, rest in parts if not _REFUSED.search(rest.strip())}
