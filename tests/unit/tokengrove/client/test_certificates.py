"""The certificates of HTTPS servers are read once for all clients, not for each."""

from __future__ import annotations

import httpx
import httpx2
import pytest

from tokengrove.client import AsyncClient, Client
from tokengrove.client.certificates import trusted


async def test_clients_read_the_certificates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = (httpx, httpx2)
    before = [trusted(library) for library in libraries]

    def read_again() -> None:
        raise AssertionError("the certificates were read again")

    for library in libraries:
        monkeypatch.setattr(library, "create_ssl_context", read_again)
    with Client("https://h") as client, client.http_client(), client.http_client("httpx2"):
        pass
    async with AsyncClient("https://h") as beside, beside.http_client(), beside.http_client("httpx2"):
        pass
    assert [trusted(library) for library in libraries] == before


def test_other_certificates_are_read_when_the_environment_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    before = trusted(httpx)
    monkeypatch.setenv("SSL_CERT_DIR", "/")
    assert trusted(httpx) is not before
