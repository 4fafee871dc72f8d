"""The page: who gets it, with which headers, and that it can be turned off."""

from __future__ import annotations

import gzip
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from proxy.page.endpoints import page_files
from tests.support import JSON, Server, says, serving

BROWSER = {
    "accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
    "sec-fetch-site": "none",
    "sec-fetch-mode": "navigate",
    "sec-fetch-dest": "document",
}
FROM_ELSEWHERE = {**BROWSER, "sec-fetch-site": "cross-site"}

on_one_server = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with serving(tmp_path_factory.mktemp("open"), says()) as server, client_of(server) as http:
        yield Server(server.app, http, server.engine)


def client_of(server: Server) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=server.app, raise_app_exceptions=False, client=("127.0.0.1", 5))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080", headers=JSON)


@on_one_server
@pytest.mark.parametrize("path", ["/", "/ui"])
async def test_a_browser_gets_the_page(server: Server, path: str) -> None:
    response = await server.http.get(path, headers=BROWSER)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text.startswith("<!doctype html>")
    # What `/` says depends on who asks: no cache may give the page to an agent, or the error to a browser.
    assert ("accept" in re.split(", *", response.headers["vary"])) == (path == "/")


@on_one_server
@pytest.mark.parametrize("accept", ["*/*", "application/json", "text/html;q=0", ""])
async def test_a_client_that_probes_the_root_gets_the_error_it_got_without_a_page(server: Server, accept: str) -> None:
    response = await server.http.get("/", headers={"accept": accept})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert "POST /SESSION/v1/chat/completions" in response.json()["error"]["message"]


@on_one_server
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["/", "/ui", "/ui/app.js"])
async def test_other_methods_are_refused_as_json(server: Server, method: str, path: str) -> None:
    response = await server.http.request(method, path, headers=BROWSER)
    assert response.status_code == 405
    assert f"does not support {method}" in response.json()["error"]["message"]


@on_one_server
async def test_head_has_the_headers_of_get_and_no_content(server: Server) -> None:
    for path in ("/", "/ui", "/ui/app.js"):
        head, get = [await server.http.request(method, path, headers=BROWSER) for method in ("HEAD", "GET")]
        assert (head.status_code, head.headers["content-length"]) == (200, get.headers["content-length"])
        assert head.headers["etag"] == get.headers["etag"]


@on_one_server
async def test_every_file_is_served_with_headers_that_let_nothing_else_in(server: Server) -> None:
    for name, file in page_files().files.items():
        response = await server.http.get(f"/ui/{name}", headers={"accept-encoding": "identity"})
        assert (response.status_code, response.content) == (200, file.content), name
        rules = dict(rule.strip().split(" ", 1) for rule in response.headers["content-security-policy"].split(";"))
        assert rules["default-src"] == "'none'"
        assert rules["img-src"] == "'self' blob:"
        assert rules["connect-src"] == rules["style-src"] == "'self'"
        assert re.fullmatch(r"'self' 'sha256-[\w+/=]+'", rules["script-src"])
        assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
        assert (rules["require-trusted-types-for"], rules["trusted-types"]) == ("'script'", "'none'")
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cross-origin-opener-policy"] == "same-origin"
        assert response.headers["cross-origin-resource-policy"] == "same-origin"
        assert "set-cookie" not in response.headers


@on_one_server
@pytest.mark.parametrize(
    "name",
    ["nothing.js", "../files.py", "..%2Ffiles.py", "%2e%2e/endpoints.py", "vendor/README.md", "app.js/", "app%00"],
)
async def test_there_is_no_other_file(server: Server, name: str) -> None:
    response = await server.http.get(f"/ui/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"


@on_one_server
async def test_a_file_that_the_browser_has_is_not_sent_again(server: Server) -> None:
    for encoding in ("identity", "gzip"):
        first = await server.http.get("/ui/app.js", headers={"accept-encoding": encoding})
        tag = first.headers["etag"]
        for had in (tag, f"W/{tag}", f'"other", {tag}'):
            again = await server.http.get("/ui/app.js", headers={"accept-encoding": encoding, "if-none-match": had})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        changed = await server.http.get("/ui/app.js", headers={"if-none-match": '"other"'})
        assert changed.status_code == 200


@on_one_server
async def test_the_page_names_its_files_by_version_so_that_a_browser_keeps_them(server: Server) -> None:
    page = await server.http.get("/ui")
    assert page.headers["cache-control"] == "no-cache"
    names = re.findall(r'"(?:\./)?(ui/[^"]+\.(?:js|mjs|css|svg))"', page.text)
    assert len(names) > 20
    for name in names:
        assert name.startswith(f"ui/@{page_files().version}/")
        response = await server.http.get(f"/{name}")
        assert (response.status_code, response.headers["cache-control"][-9:]) == (200, "immutable"), name
        other = await server.http.get(f"/{name.replace(page_files().version, '0123456789abcdef')}")
        assert (other.headers["cache-control"], other.content) == ("no-cache", response.content)


@on_one_server
async def test_files_are_compressed_for_who_takes_that(server: Server) -> None:
    plain = await server.http.get("/ui/vendor/uplot/uPlot.esm.js", headers={"accept-encoding": "gzip;q=0, br"})
    zipped = await server.http.get("/ui/vendor/uplot/uPlot.esm.js", headers={"accept-encoding": "br;q=0.5, gzip"})
    assert "content-encoding" not in plain.headers
    assert zipped.headers["content-encoding"] == "gzip"
    assert plain.headers["vary"] == zipped.headers["vary"] == "accept-encoding"
    assert plain.headers["etag"] != zipped.headers["etag"]
    assert zipped.content == plain.content
    file = page_files().files["vendor/uplot/uPlot.esm.js"]
    assert int(zipped.headers["content-length"]) == len(file.compressed) < len(file.content) / 2
    assert gzip.decompress(file.compressed) == file.content


@on_one_server
async def test_addresses_within_the_page_hold_below_any_prefix_of_a_gateway(server: Server) -> None:
    page = (await server.http.get("/ui")).text
    found = re.findall(r'(?:href|src)="([^"]*)"', page) + re.findall(r'": "([^"]*)"', page)
    assert len(found) > 10
    for address in found:
        assert re.match(r"(\./)?ui/", address), address
    beyond = await server.http.get("/ui/")
    assert (beyond.status_code, beyond.headers["location"]) == (308, "../ui")


@on_one_server
async def test_a_link_of_another_site_opens_the_page_and_no_frame_script_or_request_of_it_does(server: Server) -> None:
    for path in ("/", "/ui"):
        assert (await server.http.get(path, headers=FROM_ELSEWHERE)).status_code == 200
        for other in ({"sec-fetch-dest": "iframe"}, {"sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}):
            assert (await server.http.get(path, headers=FROM_ELSEWHERE | other)).status_code == 403
        assert (await server.http.post(path, headers=FROM_ELSEWHERE)).status_code == 403
        assert (await server.http.get(path, headers={**FROM_ELSEWHERE, "host": "evil.example"})).status_code == 403
    for path in ("/ui/app.js", "/rl/sessions", "/engine"):
        assert (await server.http.get(path, headers=FROM_ELSEWHERE)).status_code == 403


async def test_without_the_page_its_paths_are_those_of_any_unknown_endpoint(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), page=False) as server:
        for path in ("/", "/ui", "/ui/", "/ui/app.js"):
            response = await server.http.get(path, headers=BROWSER)
            assert response.status_code == 404
            assert "has no endpoint" in response.json()["error"]["message"]


async def test_the_page_needs_no_key_and_what_it_reads_does(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), admin_key="admin") as server:
        assert (await server.http.get("/ui")).status_code == 200
        assert (await server.http.get("/rl/sessions?limit=1")).status_code == 401
        for key, status in {"admin": 200, "wrong": 403}.items():
            answer = await server.http.get("/rl/sessions?limit=1", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status


async def test_requests_of_the_page_are_counted_under_few_labels(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        for path in ("/", "/ui", "/ui/app.js", "/ui/lib/api.js", "/ui/no/such~secret/file"):
            await server.http.get(path, headers=BROWSER)
        text = (await server.http.get("/metrics")).text
    routes = set(re.findall(r'tokengrove_http_requests_total\{[^}]*route="([^"]*)"', text))
    assert {"/", "/ui", "/ui/{file}"} <= routes
    assert not any("secret" in route or "app.js" in route for route in routes)
