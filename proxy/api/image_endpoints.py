"""`GET /rl/sessions/{session}/images/{digest}`: an image of a session, as its client sent it.

The bytes of a digest never change, so browsers may cache them. The headers prevent browsers from executing them,
whatever they contain.
"""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response

from proxy.api.http import key_of
from proxy.api.known_fields import check_known
from proxy.sessions.access import Access
from proxy.sessions.ids import check_dots
from proxy.sessions.registry import Registry
from proxy.store.stored_images import StoredImages
from tokengrove.errors import NotFound, brief

_DIGEST = re.compile("[0-9a-f]{64}")
_HEADERS = {
    "cache-control": "private, max-age=31536000, immutable",
    "vary": "authorization, x-api-key",  # a cached image is only for the key that requested it
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; sandbox",
}


class ImageEndpoints:
    """Returns images to callers that may read their session."""

    def __init__(self, access: Access, registry: Registry, images: StoredImages) -> None:
        self._access, self._registry, self._images = access, registry, images

    async def show(self, request: Request) -> Response:
        """The bytes of an image that a turn of the session has. Raises NotFound for another digest."""
        self._access.check_reader(key_of(request))
        check_known(request.query_params, ())
        session = await self._registry.get(check_dots(request.path_params["session"]))
        digest = request.path_params["digest"]
        # Only valid digests are looked up, because a database refuses some texts, such as text with NUL.
        file = await self._images.find(session.id, digest) if _DIGEST.fullmatch(digest) else None
        if file is None:
            raise NotFound(f"session {brief(session.id)} has no image {brief(digest)}", param="digest")
        return Response(file.data, media_type=file.media_type, headers=_HEADERS)
