"""The trusted certificates of HTTPS, read once, because reading them takes longer than a request.

Every episode has its own client, and there are hundreds of episodes.
"""

from __future__ import annotations

import os
import ssl
from functools import cache
from typing import Any


def trusted(library: Any) -> ssl.SSLContext:
    """The context that httpx or httpx2 makes for each client, shared by all clients of that library."""
    return _context(library, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@cache
def _context(library: Any, file: str | None, folder: str | None) -> ssl.SSLContext:
    """`file` and `folder`: environment variables with the locations of certificates, which the library reads."""
    context: ssl.SSLContext = library.create_ssl_context()
    return context
