"""`/`, `/ui` and the files below `/ui/`. They need no key: they hold nothing, and what they show is read with one."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from proxy.page.files import page_files


class PageEndpoints:
    """Serves the files of the page from memory."""

    def __init__(self) -> None:
        self._files = page_files()

    async def page(self, request: Request) -> Response:
        """The page itself."""
        return self._send("index.html", request)

    async def file(self, request: Request) -> Response:
        """A file of the page. Raises HTTPException 404 for any other name."""
        return self._send(request.path_params["file"], request)

    def _send(self, name: str, request: Request) -> Response:
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        if request.headers.get("if-none-match") == file.headers["etag"]:
            return Response(status_code=304, headers=file.headers)
        return Response(file.content, headers=file.headers)
