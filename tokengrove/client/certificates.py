"""The certificates that HTTPS servers are checked against, read once: reading them takes longer than a request.

Episodes have clients of their own, hundreds of them.
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
    """`file` and `folder`: the variables that say where the certificates are, which the library reads."""
    context: ssl.SSLContext = library.create_ssl_context()
    return context
