"""Every path, command, flag, port and variable of images and compose files exists in the code. Docker is not needed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from proxy.settings import VARIABLE_PREFIX, Settings, read_settings
from tokengrove import commands

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.gpu"]
COMPOSE = [DOCKER / "compose.yml", DOCKER / "compose.scale.yml"]
VARIABLES = {VARIABLE_PREFIX + spec.name.upper() for spec in fields(Settings)}
HEALTH = {"/health", "/ready"}


def instructions(path: Path) -> list[tuple[str, str]]:
    """The keyword and text of each instruction, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(keyword, rest) for keyword, _, rest in (line.partition(" ") for line in lines)]


def values(path: Path, keyword: str) -> list[str]:
    return [rest for name, rest in instructions(path) if name == keyword]


def faults_of_command(arguments: list[str]) -> Iterator[str]:
    """Yield what `tokengrove ARGUMENTS` would refuse: unknown commands and flags; invalid values raise."""
    group: Any = typer.main.get_command(commands.app)
    command = group.get_command(None, arguments[0])
    if command is None:
        yield f"there is no command {arguments[0]}"
        return
    known = {flag: option for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    rest = iter(arguments[1:])
    given: dict[str, Any] = {}
    for flag in rest:
        if flag not in known:
            yield f"{arguments[0]} has no flag {flag}"
        elif not known[flag].is_flag:
            given[known[flag].name] = next(rest, None)
    if "port" in given:
        given["port"] = int(given["port"])
    read_settings(given, {f"{VARIABLE_PREFIX}ADMIN_KEY": "k" * 16})  # raises for an invalid value


def faults_of_environment(names: list[str]) -> Iterator[str]:
    yield from (f"{name} is no setting" for name in names if name.startswith(VARIABLE_PREFIX) and name not in VARIABLES)


def faults_of_image(image: str) -> Iterator[str]:
    name, _, tag = image.partition(":")
    if not re.search(r"\d+\.\d+", tag):
        yield f"the image {name} is not pinned"


def health_url(text: str) -> tuple[int, str]:
    found = re.search(r"127\.0\.0\.1:(\d+)(/\w+)", text)
    assert found is not None, text
    return int(found[1]), found[2]


def services(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["services"]
    return found


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_what_exists_and_runs_a_server_that_is_no_root(path: Path) -> None:
    for rest in values(path, "COPY"):
        if not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
    assert values(path, "USER") == ["10001"]
    assert values(path, "VOLUME") == values(path, "WORKDIR")[-1:] == ["/data"]
    assert values(path, "ENTRYPOINT") == ['["tokengrove"]']
    assert [*faults_of_command(yaml.safe_load(values(path, "CMD")[0]))] == []
    for image in values(path, "FROM"):
        assert [*faults_of_image(image.split()[0])] == []
    variables = dict(pair.split("=", 1) for rest in values(path, "ENV") for pair in shlex.split(rest))
    assert [*faults_of_environment([*variables])] == []
    port, endpoint = health_url(values(path, "HEALTHCHECK")[0])
    assert str(port) == variables["TOKENGROVE_PORT"] == values(path, "EXPOSE")[0]
    assert endpoint in HEALTH


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_files_that_a_dockerfile_copies_are_not_ignored(path: Path) -> None:
    kept = {line[1:] for line in Path(f"{path}.dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = [source for rest in values(path, "COPY") if "--from" not in rest for source in rest.split()[:-1]]
    assert set(sources) == kept


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_extras_that_images_install_are_declared(path: Path) -> None:
    declared = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
    for extras in re.findall(r"'\.\[([\w,]+)\]'", path.read_text()):
        assert set(extras.split(",")) <= declared


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_a_compose_file_has_only_known_flags_variables_and_files(path: Path) -> None:
    found = services(path)
    server = found["tokengrove"]
    assert [*faults_of_command(server["command"])] == []
    assert [*faults_of_environment([*server["environment"]])] == []
    assert (path.parent / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    for name, service in found.items():
        assert set(service.get("depends_on", ())) <= found.keys(), name
        if "image" in service:
            assert [*faults_of_image(service["image"])] == [], name
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert not source.startswith(".") or (path.parent / source).is_file(), mount
    assert server["environment"]["TOKENGROVE_DATABASE_URL"].endswith("@postgres/tokengrove")
    assert found["postgres"]["environment"]["POSTGRES_DB"] == "tokengrove"
    read_settings({"forwarded_allow_ips": server["environment"].get("TOKENGROVE_FORWARDED_ALLOW_IPS")}, {})


@pytest.mark.wide
def test_compose_files_keep_to_the_schema_of_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    checked = subprocess.run([*command, *DOCKER.glob("compose*.yml")], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_reads_its_file_and_the_variables_beside_it(path: Path, tmp_path: Path) -> None:
    """Offline, by the command of version 1 where it is installed: it knows all fields of these two files."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    (tmp_path / ".env").write_text(
        "TOKENGROVE_ADMIN_KEY=chosen-for-compose\nPOSTGRES_PASSWORD=secret\nMODEL=/models/m\n"
    )
    copied = shutil.copy(path, tmp_path)
    printed = subprocess.run(["docker-compose", "-f", copied, "config"], check=True, capture_output=True, text=True)
    environment = yaml.safe_load(printed.stdout)["services"]["tokengrove"]["environment"]
    assert environment["TOKENGROVE_ADMIN_KEY"] == "chosen-for-compose"
    assert environment["TOKENGROVE_DATABASE_URL"] == "postgresql://tokengrove:secret@postgres/tokengrove"


def test_nginx_passes_on_to_the_servers_of_its_compose_file_and_holds_nothing_back() -> None:
    text = (DOCKER / "nginx.conf").read_text()
    found = services(DOCKER / "compose.scale.yml")
    for name, port in re.findall(r"server (\w+):(\d+)", text):
        assert name in found
        assert f"TOKENGROVE_PORT={port}" in (DOCKER / "Dockerfile").read_text()
    for upstream in re.findall(r"proxy_pass http://(\w+)", text):
        assert f"upstream {upstream} " in text
    listened = re.search(r"listen (\d+)", text)
    assert listened is not None and found["nginx"]["ports"] == [f"{listened[1]}:{listened[1]}"]
    assert "proxy_buffering off" in text
    limit = re.search(r"client_max_body_size (\d+)m", text)
    assert limit is not None and int(limit[1]) * 2**20 == Settings().max_body_bytes
    assert text.count("{") == text.count("}")


def test_every_engine_server_listens_where_the_servers_ask() -> None:
    found = services(DOCKER / "compose.scale.yml")
    command = found["tokengrove"]["command"]
    asked = set()
    for url in command[command.index("--engine") + 1].split(","):
        name, port = url.removeprefix("http://").split(":")
        assert str(found[name]["command"][found[name]["command"].index("--port") + 1]) == port
        asked.add(name)
    assert asked == {name for name in found if name.startswith("sglang")} and len(asked) == 2


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["sevre"], "no command sevre"),
        (["serve", "--database", "x"], "no flag --database"),
        (["serve", "--port"], None),
    ],
)
def test_the_checks_find_each_fault(arguments: list[str], fault: str | None) -> None:
    if fault is None:
        with pytest.raises(TypeError):
            list(faults_of_command(arguments))
    else:
        assert fault in next(faults_of_command(arguments))
    assert next(faults_of_environment(["TOKENGROVE_ADMIN"])) == "TOKENGROVE_ADMIN is no setting"
    assert next(faults_of_image("nginx:latest")) == "the image nginx is not pinned"
