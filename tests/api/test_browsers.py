"""A page of another site reaches nothing on a server without an admin key, on no route and under no name."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from proxy.engine.scripted.scripts import Reply, Script
from proxy.serving.server import serving as served
from proxy.settings import Settings
from tests.support import JSON, Server, sampled, serving, user
from tests.wide import CROSSED
from tests.workers import workers_of
from tokengrove.errors import ConfigurationError

ADMIN = {"authorization": "Bearer admin"}
TURN = {"model": "m", "messages": [user("hi")]}
LOCAL = "127.0.0.1:8080"
FOREIGN_HOSTS = [
    *(
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "notlocalhost",
        "0.0.0.0",
    ),
    *("192.168.0.7:8080", "[::2]", "[::]", "localhost@evil.example", "user@localhost", "localhost:8080@evil.example"),
    *("127.1", "0x7f.0.0.1", "0177.0.0.1", "2130706433", "[::1", "[::1%25lo]", "[127.0.0.1]", "", " ", ":8080"),
    *("localhost:80:80", "localhost:port", "localhost:123456", "localhost..", "local_host", "localhost, evil.example"),
    *("localhost/", "localhost#", "a" * 5000, "☃", "①.0.0.1", "evil.example?localhost"),
]
OWN_HOSTS = [
    *("localhost", "LOCALHOST:1", "localhost.", "LocalHost.:8080", "a.localhost", "127.0.0.1", "127.0.0.1:65535"),
    *("127.8.9.10:80", "[::1]", "[::1]:8080", "[0:0:0:0:0:0:0:1]", "[::FFFF:127.0.0.1]:3", "localhost:"),
]
FOREIGN_ORIGINS = [
    *("http://evil.example", "https://evil.example:8080", "null", "", "file://", "vscode-webview://abc", "localhost"),
    *("http://localhost.evil.example", "http://localhost@evil.example", "http://localhost:80 http://evil.example"),
    *(
        "http://localhost/",
        "ftp://localhost",
        "chrome-extension://abc",
        "http://0.0.0.0",
        "https://evil.example/localhost",
    ),
]


def always() -> Script:
    reply = Reply(sampled("ok"), chunk=64)
    return lambda request: reply


@contextlib.asynccontextmanager
async def at_loopback(folder: Path, **settings: Any) -> AsyncIterator[Server]:
    """An app, and a client that reaches it as if over a connection to 127.0.0.1:8080."""
    async with serving(folder, always(), **settings) as server, client_of(server) as http:
        yield Server(server.app, http, server.engine)


def client_of(server: Server, peer: str = "127.0.0.1") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=server.app, raise_app_exceptions=False, client=(peer, 5))
    return httpx.AsyncClient(transport=transport, base_url=f"http://{LOCAL}", headers=JSON)


on_the_open_app = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with at_loopback(tmp_path_factory.mktemp("open")) as server:
        yield server


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"].get("code", response.json()["error"].get("type"))


def every_address(server: Server) -> list[tuple[str, str]]:
    """A method and a path for each route, and paths that no route has."""
    found = [("GET", "/"), ("POST", "/nowhere"), ("OPTIONS", "/rl/set_reward"), ("PUT", "/x/v1/messages")]
    for route in server.app.routes:
        path = route.path  # type: ignore[attr-defined]
        for name in ("session:path", "model:path", "interaction"):
            path = path.replace(f"{{{name}}}", "x")
        found += [(method, path) for method in sorted(route.methods)]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("headers", "refusal"),
    [
        ({"host": "evil.example:8080"}, "host_not_allowed"),
        ({"origin": "http://evil.example"}, "origin_not_allowed"),
        ({"origin": "null"}, "origin_not_allowed"),
        ({"sec-fetch-site": "cross-site"}, "origin_not_allowed"),
    ],
)
@on_the_open_app
async def test_no_route_of_an_open_server_answers_another_site(
    open_server: Server, headers: dict[str, str], refusal: str
) -> None:
    before, asked = (await open_server.http.get("/rl/sessions")).json(), len(open_server.engine.requests)
    for method, path in every_address(open_server):
        content = b"{}" if method in ("POST", "DELETE") else None
        response = await open_server.http.request(method, path, headers=headers, content=content)
        assert response.status_code == 403, (method, path)
        assert "access-control-allow-origin" not in response.headers
        if method != "HEAD" and not path.endswith(("/messages", "/messages/count_tokens")):
            error = response.json()["error"]
            assert (error["details"][0]["reason"] if "details" in error else error["code"]) == refusal, (method, path)
    assert (await open_server.http.get("/rl/sessions")).json() == before
    assert len(open_server.engine.requests) == asked


@pytest.mark.parametrize("host", FOREIGN_HOSTS, ids=lambda host: host[:30])
@on_the_open_app
async def test_a_foreign_host_is_refused_and_the_error_names_the_way_out(open_server: Server, host: str) -> None:
    response = await open_server.http.get("/rl/sessions", headers=[(b"host", host.encode())])
    assert code(response) == (403, "host_not_allowed")
    message = response.json()["error"]["message"]
    assert "--allowed-hosts" in message and "admin key" in message and len(message) < 700


@pytest.mark.parametrize("host", OWN_HOSTS)
@on_the_open_app
async def test_loopback_names_are_accepted_at_any_port(open_server: Server, host: str) -> None:
    for origin in ({}, {"origin": f"http://{host}"}, {"origin": "http://localhost:8080"}):
        for site in ("same-origin", "same-site", "none"):
            headers = {"host": host, "sec-fetch-site": site, **origin}
            assert (await open_server.http.get("/health", headers=headers)).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "app.localhost", "127.0.0.2"])
@pytest.mark.parametrize("end", [":3000", ":80", "", ":8081", ":0", ":65535"])
@on_the_open_app
async def test_a_page_at_another_port_of_this_machine_is_refused(open_server: Server, host: str, end: str) -> None:
    for scheme in ("http", "https"):
        for site in ("same-site", "cross-site"):
            headers = {"origin": f"{scheme}://{host}{end}", "host": "localhost:8080", "sec-fetch-site": site}
            response = await open_server.http.post("/s/v1/chat/completions", json=TURN, headers=headers)
            assert code(response) == (403, "origin_not_allowed")
            assert "--allowed-origins" in response.json()["error"]["message"]


async def test_a_page_at_another_port_is_let_in_where_it_is_allowed(tmp_path: Path) -> None:
    async with at_loopback(tmp_path, allowed_origins="http://localhost:3000") as server:
        for port, status in (("3000", 200), ("3001", 403)):
            origin = {"origin": f"http://localhost:{port}", "sec-fetch-site": "same-site"}
            assert (await server.http.get("/rl/sessions", headers=origin)).status_code == status


@on_the_open_app
async def test_a_forwarded_port_is_the_servers_own(open_server: Server) -> None:
    headers = {"origin": "http://localhost:9000", "host": "localhost:9000", "sec-fetch-site": "same-origin"}
    assert (await open_server.http.get("/rl/sessions", headers=headers)).status_code == 200


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS)
@on_the_open_app
async def test_a_foreign_origin_is_refused(open_server: Server, origin: str) -> None:
    for headers in ([("origin", origin)], [("origin", "http://localhost"), ("origin", origin)]):
        response = await open_server.http.get("/metrics", headers=headers)
        assert code(response) == (403, "origin_not_allowed")
    assert "--allowed-origins" in response.json()["error"]["message"]


@on_the_open_app
async def test_two_hosts_are_refused_and_none_is_no_browser(open_server: Server) -> None:
    for hosts in ([], ["localhost", "localhost"], ["localhost", "evil.example"]):
        request = open_server.http.build_request("GET", "/health")
        del request.headers["host"]
        request.headers = httpx.Headers([*request.headers.multi_items(), *(("host", host) for host in hosts)])
        answer = await open_server.http.send(request)
        assert (code(answer) == (403, "host_not_allowed")) if hosts else (answer.status_code == 200)


async def test_on_the_wire_the_host_counts_whatever_the_target_says(tmp_path: Path) -> None:
    def statuses(url: str) -> None:
        assert httpx.get(f"{url}/health").status_code == 200
        port = int(url.rpartition(":")[2])
        for head, status in (
            ("GET /health HTTP/1.1\r\nhost: localhost", 200),
            ("GET http://evil.example/health HTTP/1.1\r\nhost: localhost", 200),  # for a proxy; browsers send no such
            ("GET http://localhost/health HTTP/1.1\r\nhost: evil.example", 403),
            ("GET /health HTTP/1.1\r\nhost: evil.example", 403),
            ("GET /health HTTP/1.1\r\nHOST:   evil.example  ", 403),
            ("GET /health HTTP/1.0", 200),
            ("GET /health HTTP/1.0\r\nhost: localhost", 200),
            (f"GET /health HTTP/1.1\r\nhost: 0.0.0.0:{port}", 403),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(f"{head}\r\nconnection: close\r\n\r\n".encode())
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
            assert answer.split(b" ")[1] == str(status).encode(), (head, answer)

    settings = Settings(port=0, engine="scripted", database_url=f"sqlite:///{tmp_path / 'test.db'}")
    with served(settings) as url:
        await asyncio.to_thread(statuses, url)


async def test_further_names_are_those_of_the_settings(tmp_path: Path) -> None:
    settings = {"public_url": "https://Rollouts.example/x", "allowed_hosts": "Grove, *.svc.local,10.0.0.5, [fd00::5]"}
    own = ("rollouts.example", "grove:8080", "a.svc.local", "b.a.SVC.local.:1", "10.0.0.5", "[FD00::5]:80", "localhost")
    foreign = ("svc.local", "xsvc.local", "grove.example", "a.grove", "10.0.0.6", "[fd00::6]", "rollouts.example.evil")
    async with at_loopback(tmp_path, **settings) as server:
        for hosts, status in ((own, 200), (foreign, 403)):
            for host in hosts:
                assert (await server.http.get("/health", headers={"host": host})).status_code == status, host
                origin = {"origin": f"https://{host}"} | ({"host": host} if status == 200 else {})
                assert (await server.http.get("/health", headers=origin)).status_code == status, host


async def test_a_keyed_server_checks_hosts_only_where_they_are_given_and_no_origins(tmp_path: Path) -> None:
    other = {"host": "grove:8080", "origin": "http://evil.example", "sec-fetch-site": "cross-site"}
    async with at_loopback(tmp_path, admin_key="admin", public_url="https://public.example") as server:
        assert (await server.http.get("/rl/sessions", headers={**ADMIN, **other})).status_code == 200
    (tmp_path / "given").mkdir()
    async with at_loopback(tmp_path / "given", admin_key="admin", allowed_hosts="grove") as server:
        assert (await server.http.get("/rl/sessions", headers={**ADMIN, **other})).status_code == 200
        assert (await server.http.get("/health", headers={"host": "localhost"})).status_code == 200  # a probe
        refused = await server.http.get("/rl/sessions", headers={**ADMIN, "host": "evil.example"})
        assert code(refused) == (403, "host_not_allowed")


async def test_the_address_of_the_connection_itself_is_accepted(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), admin_key="admin", allowed_hosts="grove") as server:
        transport = httpx.ASGITransport(app=server.app)  # a kubelet probes the address of the pod
        for url, status in (("http://10.1.2.3:8080", 200), ("http://[fd00::9]", 200)):
            async with httpx.AsyncClient(transport=transport, base_url=url) as http:
                assert (await http.get("/health")).status_code == status
                assert (await http.get("/health", headers={"host": "10.1.2.4"})).status_code == 403


WEBVIEWS = "vscode-webview://*, https://app.example, https://*.tools.example:8443, tauri://localhost"


@pytest.mark.parametrize("admin_key", [None, "admin"])
async def test_allowed_origins_may_call_and_read_and_others_may_not(tmp_path: Path, admin_key: str | None) -> None:
    async with at_loopback(tmp_path, admin_key=admin_key, allowed_origins=WEBVIEWS) as server:
        started = await server.ok("/rl/start_session", {"session_id": "s"}, headers=ADMIN)
        path = started["base_url"] + "/chat/completions"
        for origin in (
            "vscode-webview://1a2b",
            "https://app.example",
            "https://a.tools.example:8443",
            "tauri://localhost",
        ):
            headers = {"origin": origin, "sec-fetch-site": "cross-site"}
            asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-a"}
            preflight = await server.http.options(path, headers={**headers, **asked})
            assert (preflight.status_code, preflight.content) == (204, b"")
            assert preflight.headers["access-control-allow-headers"] == "authorization,x-a"
            assert "POST" in preflight.headers["access-control-allow-methods"]
            for response in (
                await server.post(path, TURN, headers=headers),
                await server.post(path, {**TURN, "stream": True}, headers=headers),
                await server.post(path, {}, headers=headers),
                preflight,
            ):
                assert response.headers["access-control-allow-origin"] == origin
                assert response.headers["vary"] == "origin"
        for origin in ("https://app.example.evil", "https://xtools.example:8443", "https://tools.example:8443", "null"):
            response = await server.post(path, TURN, headers={"origin": origin})
            assert response.status_code == (403 if admin_key is None else 200)
            assert "access-control-allow-origin" not in response.headers


async def test_an_allowed_origin_does_not_open_a_foreign_host(tmp_path: Path) -> None:
    async with at_loopback(tmp_path, allowed_origins=WEBVIEWS) as server:
        headers = {"origin": "https://app.example", "host": "app.example"}
        assert code(await server.http.get("/health", headers=headers)) == (403, "host_not_allowed")


@CROSSED
@pytest.mark.parametrize(
    "content_type",
    [
        *(None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json"),
        *("application/jsonp", "application", "text/plain; application/json", "application/json, text/plain"),
    ],
)
@pytest.mark.parametrize("admin_key", [None, "admin"])
async def test_a_body_of_another_type_is_415_and_changes_nothing(
    tmp_path: Path, content_type: str | None, admin_key: str | None
) -> None:
    async with at_loopback(tmp_path, admin_key=admin_key) as server:
        del server.http.headers["content-type"]
        headers = ADMIN if content_type is None else {**ADMIN, "content-type": content_type}
        await server.ok("/rl/start_session", {"session_id": "x"}, headers=ADMIN)
        before = (await server.http.get("/rl/sessions", headers=ADMIN)).json()
        for method, path in every_address(server):
            if method not in ("POST", "DELETE") or path == "/nowhere":
                continue
            response = await server.http.request(method, path, headers=headers, content=b'{"reward": 1}')
            if path.startswith("/rl/") and response.status_code == 404:
                continue  # the key in the request names no session
            assert response.status_code in ((415,) if admin_key is None else (415, 401)), (path, response.text)
            if response.status_code == 415:
                assert "application/json" in response.json()["error"]["message"]
        assert (await server.http.get("/rl/sessions", headers=ADMIN)).json() == before
        assert server.engine.requests == []


@on_the_open_app
async def test_json_has_parameters_and_relatives_and_an_empty_body_needs_no_type(open_server: Server) -> None:
    for kind in (
        "application/json; charset=utf-8",
        "Application/JSON",
        "application/vnd.api+json",
        "application/json ;x=1",
    ):
        headers = {"content-type": kind}
        assert (await open_server.post("/json/v1/chat/completions", TURN, headers=headers)).status_code == 200

    async def nothing() -> AsyncIterator[bytes]:
        yield b""

    for kind in ("application/octet-stream", ""):
        headers = {"content-type": kind}
        for content in (b"", nothing()):
            response = await open_server.http.post("/grant_capacity", content=content, headers=headers)
            assert response.status_code == 200, response.text


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_engine_servers_of_an_open_server_are_managed_from_this_machine_only(tmp_path: Path, method: str) -> None:
    body = {"url": "http://169.254.169.254"}

    async def status(http: httpx.AsyncClient, path: str = "/engine/servers", **headers: str) -> int:
        return (await http.request(method, path, json=body, headers=headers)).status_code

    async with serving(tmp_path, always()) as server, client_of(server) as near, client_of(server, "10.0.0.9") as far:
        assert await status(near) == await status(near, **{"x-forwarded-for": "127.0.0.1, ::1"}) == 501  # no pool
        assert await status(far) == 403
        for header, value in (
            ("x-forwarded-for", "10.0.0.9"),
            ("x-forwarded-for", "127.0.0.1, 10.0.0.9"),
            ("x-forwarded-for", "unknown"),
            ("x-real-ip", "10.0.0.9"),
            ("forwarded", "for=10.0.0.9"),
        ):
            assert await status(near, **{header: value}) == 403
        refused = await far.request(method, "/engine/servers", json=body)
        assert "TOKENGROVE_ADMIN_KEY" in refused.json()["error"]["message"]
        assert (await far.get("/engine")).status_code == 200
    (tmp_path / "keyed").mkdir()
    keyed = serving(tmp_path / "keyed", always(), admin_key="admin")
    async with keyed as server, client_of(server, "10.0.0.9") as far:
        assert await status(far) == 401 and await status(far, **ADMIN) == 501


async def test_what_a_worker_passes_on_is_checked_once_by_the_worker_that_was_called(
    tmp_path: Path, postgres_url: str
) -> None:
    async with workers_of(tmp_path, postgres_url, allowed_origins=WEBVIEWS, migrate=True) as workers:
        http = workers[1].http
        shown = await http.get("/engine", headers={"origin": "https://app.example"})
        assert (shown.status_code, shown.headers.get_list("access-control-allow-origin")) == (
            200,
            ["https://app.example"],
        )
        assert (await http.get("/engine", headers={"host": "evil.example"})).status_code == 403
        passed = {"x-forwarded-for": "10.0.0.9"}
        assert (await http.post("/engine/servers", json={"url": "http://10.0.0.1"}, headers=passed)).status_code == 403
        assert (await http.post("/engine/servers", json={"url": "http://10.0.0.1"})).status_code == 501


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("allowed_hosts", text)
            for text in ("", ",", "a:80", "http://a", "*", "a.*", "*.", "a b", "a/b", "::1", "a@b")
        ),
        *(
            ("allowed_origins", text)
            for text in ("", "*", "null", "https://*", "http://*", "https://a/", "a.example", "x:")
        ),
        *(("public_url", text) for text in ("", "rollouts.example", "https://", "http://[")),
    ],
)
def test_a_setting_that_means_no_host_or_origin_stops_the_start(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--{name.replace('_', '-')}"):
        Settings(**{name: value})  # type: ignore[arg-type]
