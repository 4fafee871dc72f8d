"""`/`, `/ui` and the files below `/ui/`. They need no key: they hold nothing, and what they show is read with one.

`/` is the page for browsers only. Agents and health checks that call it get the same JSON error as without a page.
"""

from __future__ import annotations

import re

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from proxy.page.files import PageFile, page_files

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
