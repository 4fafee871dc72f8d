"""The reverse proxies of docs/deployment.md, with the real programs: TLS, streams at once, long bodies."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest

from proxy.settings import Settings
from tests.deployment.containers import shown
from tests.deployment.stepwise import TEXT, Stepwise
from tests.docs.pages import ROOT, blocks_of
from tests.support import JSON, free_port, real_server

NAME = "rollouts.example.org"
KEY = {"authorization": "Bearer k"}


def needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


@contextmanager
def permits() -> Iterator[threading.Semaphore]:
    """New permits for the engine. A test that fails leaves no thread that waits for more."""
    with patch.object(Stepwise, "permits", threading.Semaphore(0)):
        try:
            yield Stepwise.permits
        finally:
            Stepwise.permits.release(len(TEXT))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of rollouts.pem and rollouts.key, made by the command of the page."""
    needs("openssl")
    folder = tmp_path_factory.mktemp("certificate")
    blocks = blocks_of(ROOT / "docs" / "deployment.md")
    command = next(block.text for block in blocks if block.text.startswith("openssl req"))
    subprocess.run(command, shell=True, cwd=folder, check=True, capture_output=True)
    return folder


@contextmanager
def running(command: list[str], port: int, folder: Path, **environment: str) -> Iterator[None]:
    """Run a reverse proxy, once it accepts connections."""
    log = folder / "proxy.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def nginx(text: str, port: int, folder: Path) -> Iterator[None]:
    """Run nginx on a whole configuration, which `nginx -t` accepts."""
    needs("nginx")
    user = "user root; " if os.geteuid() == 0 else ""  # the folders of tests are open to their owner only
    path = folder / "nginx.conf"
    path.write_text(user + text)
    command = ["nginx", "-p", str(folder), "-c", str(path), "-e", "stderr"]
    command += ["-g", f"daemon off; pid {folder}/nginx.pid;"]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True)
    assert checked.returncode == 0 and "[warn]" not in checked.stderr, checked.stderr
    with running(command, port, folder):
        yield


def http_block(server: str, folder: Path) -> str:
    """What a distribution's nginx.conf has around the files of conf.d."""
    kept = " ".join(
        f"{what}_temp_path {folder}/{what};" for what in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"events {{}}\nhttp {{ {kept}\n{server} }}\n"


@contextmanager
def behind_nginx(url: str, port: int, certificate: Path, folder: Path) -> Iterator[None]:
    text = shown("nginx.conf").replace("listen 443", f"listen 127.0.0.1:{port}")
    text = text.replace("http://127.0.0.1:8080", url).replace("/etc/ssl/", f"{certificate}/")
    with nginx(http_block(text, folder), port, folder):
        yield


@contextmanager
def behind_caddy(url: str, port: int, certificate: Path, folder: Path) -> Iterator[None]:
    needs("caddy")
    keys = f"tls {certificate}/rollouts.pem {certificate}/rollouts.key"
    text = shown("Caddyfile").replace(f"{NAME} {{", f"https://{NAME}:{port} {{\n    {keys}")
    options = "{\n    admin off\n    auto_https disable_redirects\n}\n"
    path = folder / "Caddyfile"
    path.write_text(options + text.replace("127.0.0.1:8080", url.removeprefix("http://")))
    command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(path)]
    with running(command, port, folder, HOME=str(folder), XDG_DATA_HOME=str(folder), XDG_CONFIG_HOME=str(folder)):
        yield


@pytest.mark.engines
@pytest.mark.parametrize("behind", [behind_nginx, behind_caddy])
def test_the_reverse_proxy_of_the_page_passes_everything_on(behind, certificate: Path, tmp_path: Path) -> None:
    engine = "tests.deployment.stepwise:Stepwise"
    port = free_port()
    trust = ssl.create_default_context(cafile=str(certificate / "rollouts.pem"))
    with (
        real_server(tmp_path, engine, admin_key="k", forwarded_allow_ips="127.0.0.1") as url,
        behind(url, port, certificate, tmp_path),
        httpx.Client(verify=trust, timeout=60, headers={"host": NAME}) as client,
        permits() as permitted,
    ):

        def post(path: str, **more: object) -> httpx.Request:
            address = f"https://127.0.0.1:{port}{path}"
            return client.build_request("POST", address, extensions={"sni_hostname": NAME}, headers=KEY | JSON, **more)

        started = client.send(post("/rl/start_session", json={"task_id": "t"})).json()
        assert started["base_url"].startswith(f"https://{NAME}/"), started
        path = httpx.URL(started["base_url"]).path
        assert client.send(post("/metrics")).status_code == 404

        turn = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "count"}]}
        reply = client.send(post(f"{path}/chat/completions", json=turn), stream=True)
        lines = reply.iter_lines()
        for character in TEXT[:-1]:  # each arrives before the engine is allowed the next
            permitted.release()
            assert next_text(lines) == character
        permitted.release(2)
        assert "data: [DONE]" in list(lines)

        long = client.send(post(f"{path}/chat/completions", content=b" " * 30_000_000 + b"{}"))
        assert (long.status_code, long.json()["error"]["param"]) == (400, "messages")  # it was read to its end
        too_long = client.send(post(f"{path}/chat/completions", content=b" " * (Settings().max_body_bytes + 1)))
        assert too_long.status_code == 413


def next_text(lines: Iterator[str]) -> str:
    """The text of the next event that has some."""
    for line in lines:
        if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
            text: str = choices[0]["delta"].get("content") or ""
            if text:
                return text
    raise AssertionError("the stream ended")


def test_the_load_balancer_of_the_compose_file_serves(tmp_path: Path) -> None:
    """Older versions than that of the compose file do not know `resolve`, and here is no DNS of Docker to ask."""
    text = (ROOT / "docker" / "nginx.conf").read_text()
    port = free_port()
    with real_server(tmp_path, admin_key="k", forwarded_allow_ips="127.0.0.1") as url:
        text = text.replace("server tokengrove:8080 resolve", f"server {url.removeprefix('http://')}")
        text = text.replace("listen 8080", f"listen 127.0.0.1:{port}")
        text = re.sub(r"(http \{)", lambda found: http_block("", tmp_path).split("\n")[1].rstrip("} "), text, count=1)
        with nginx(text, port, tmp_path):
            address = f"http://127.0.0.1:{port}"
            started = httpx.post(f"{address}/rl/start_session", json={"task_id": "t"}, headers=KEY).json()
            assert started["base_url"].startswith(address)
            turn = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
            assert httpx.post(f"{started['base_url']}/chat/completions", json=turn, headers=KEY).status_code == 200
            assert httpx.get(f"{address}/metrics").status_code == 404
