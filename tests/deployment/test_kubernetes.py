"""The manifests of docker/kubernetes are valid, and the commands in them do what they are there for.

No cluster is needed: schemas are those of the Kubernetes API, and containers run as plain processes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from proxy.serving.server import BACKSTOP_S
from proxy.settings import VARIABLE_PREFIX, Settings, read_settings
from proxy.store.backup import Conflict, import_all
from tests.deployment.containers import KUBERNETES, Machine, containers_of, documents, pods_of, variables_of
from tests.docs.pages import ROOT
from tests.support import free_port

MANIFESTS = sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml")
KUSTOMIZATIONS = ["server", "engines"]
POD_NAME = "episode-x7f2k"


def kustomized(name: str) -> list[dict[str, Any]]:
    """What `kubectl apply -k docker/kubernetes/NAME` would send."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", KUBERNETES / name]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [item for item in yaml.safe_load_all(printed) if item]


def pod(path: str, name: str) -> dict[str, Any]:
    return pods_of(documents(KUBERNETES / path))[name]


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in containers_of(pod) if item["name"] == name)


def settings_file() -> dict[str, str]:
    lines = (KUBERNETES / "server" / "settings.env").read_text().split()
    return dict(line.split("=", 1) for line in lines)


def validate(item: Any) -> None:
    """Raise ValidationError if an object breaks the schema of its kind, or has a field that the schema lacks."""
    import kubernetes_validate  # parses grammars for a second

    kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(KUBERNETES)))
def test_a_manifest_keeps_to_the_schemas_of_the_api(path: Path) -> None:
    for item in documents(path):
        validate(item)


def test_a_misspelt_field_would_be_found() -> None:
    item = documents(KUBERNETES / "server" / "server.yaml")[1]
    item["spec"]["template"]["spec"]["enableServiceLink"] = False
    from kubernetes_validate import ValidationError

    with pytest.raises(ValidationError):
        validate(item)


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_a_kustomization_builds_objects_that_refer_to_each_other(name: str) -> None:
    objects = kustomized(name)
    names = {(item["kind"], item["metadata"]["name"]) for item in objects}
    labels = [item["spec"]["template"]["metadata"]["labels"] for item in objects if "template" in item.get("spec", {})]
    for item in objects:
        validate(item)
        if item["kind"] == "Service":
            assert any(item["spec"]["selector"].items() <= of.items() for of in labels), item["metadata"]["name"]
    for spec in pods_of(objects).values():
        maps = [source["configMapRef"]["name"] for c in containers_of(spec) for source in c.get("envFrom", ())]
        assert all(("ConfigMap", found) in names for found in maps)
    settings = next(item["data"] for item in objects if item["kind"] == "ConfigMap")
    read_settings({}, {**settings, "TOKENGROVE_ADMIN_KEY": "k" * 16})  # raises for a setting that is refused


def test_engine_servers_have_the_addresses_that_the_proxy_is_given() -> None:
    objects = kustomized("engines")
    data = next(item["data"] for item in objects if item["kind"] == "ConfigMap")
    servers = next(item for item in objects if item["kind"] == "StatefulSet" and item["metadata"]["name"] == "sglang")
    port = servers["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"]
    expected = [f"http://sglang-{number}.sglang:{port}" for number in range(servers["spec"]["replicas"])]
    assert data["TOKENGROVE_ENGINE"].split(",") == expected
    command = servers["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[command.index("--model-path") + 1] == data["TOKENGROVE_MODEL"]
    assert command[command.index("--port") + 1] == str(port)
    server = container(pods_of(objects)["tokengrove"], "tokengrove")
    mounts = [mount["mountPath"] for mount in server["volumeMounts"]]
    assert any(data["TOKENGROVE_MODEL"].startswith(mount) for mount in mounts)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(KUBERNETES)))
def test_pods_pass_the_restricted_security_standard_and_ignore_the_variables_of_services(path: Path) -> None:
    for name, spec in pods_of(documents(path)).items():
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False, name
        volumes = {volume["name"] for volume in spec.get("volumes", ())} | {"postgres"}
        for each in containers_of(spec):
            assert each["securityContext"]["allowPrivilegeEscalation"] is False, each["name"]
            assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}, each["name"]
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes, each["name"]
            assert re.search(r":v?\d+\.\d+", each["image"]), f"{each['image']} is not pinned"


def test_the_server_of_a_sidecar_is_open_and_on_the_loopback_of_its_agent() -> None:
    server = container(pod("sidecar.yaml", "episode"), "tokengrove")
    assert server["restartPolicy"] == "Always"
    settings = read_settings({}, variables_of(server, {"POD_NAME": POD_NAME}))
    assert settings.loopback and settings.admin_key is None
    mounts = {mount["mountPath"] for mount in server["volumeMounts"]}
    assert settings.database_url.startswith("sqlite:////data/") and {"/data", "/trajectories"} <= mounts
    for probe in ("startupProbe", "livenessProbe"):
        assert f"http://127.0.0.1:{settings.port}/" in server[probe]["exec"]["command"][-1]


def test_every_variable_of_a_manifest_is_a_setting() -> None:
    specs = [spec for path in MANIFESTS for spec in pods_of(documents(path)).values()]
    names = {entry["name"] for spec in specs for each in containers_of(spec) for entry in each.get("env", ())}
    known = {VARIABLE_PREFIX + field.name.upper() for field in fields(Settings)}
    assert {name for name in names | settings_file().keys() if name.startswith(VARIABLE_PREFIX)} <= known


def test_the_kubelet_waits_longer_than_a_server_needs_to_stop() -> None:
    spec = pod("server/server.yaml", "tokengrove")
    server = container(spec, "tokengrove")
    before = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    shutdown = float(settings_file()["TOKENGROVE_SHUTDOWN_TIMEOUT_S"])
    assert spec["terminationGracePeriodSeconds"] > before + shutdown + BACKSTOP_S
    sidecar = pod("sidecar.yaml", "episode")
    assert sidecar["terminationGracePeriodSeconds"] > 2 * (Settings().shutdown_timeout_s + BACKSTOP_S)


def test_a_server_is_not_restarted_because_the_database_is_away() -> None:
    server = container(pod("server/server.yaml", "tokengrove"), "tokengrove")
    assert server["livenessProbe"]["httpGet"]["path"] == server["startupProbe"]["httpGet"]["path"] == "/health"
    assert server["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"] >= 120
    assert str(server["ports"][0]["containerPort"]) == settings_file()["TOKENGROVE_PORT"]


def test_the_secret_of_the_page_has_the_keys_that_pods_read() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    created = set(re.findall(r"--from-literal=([\w-]+)=", page))
    specs = [spec for path in MANIFESTS for spec in pods_of(documents(path)).values()]
    entries = [entry for spec in specs for each in containers_of(spec) for entry in each.get("env", ())]
    sources = [entry.get("valueFrom", {}).get("secretKeyRef") for entry in entries]
    assert {source["key"] for source in sources if source} == created
    assert {source["name"] for source in sources if source} == {"tokengrove"}


@pytest.mark.processes
def test_the_pod_of_the_deployment_migrates_serves_and_stops(unmigrated_postgres_url: str, tmp_path: Path) -> None:
    """The init container and the server, with the variables of the manifest, on a real Postgres."""
    spec = pod("server/server.yaml", "tokengrove")
    machine = Machine(tmp_path, free_port())
    secrets = {"POSTGRES_PASSWORD": "p", "TOKENGROVE_ADMIN_KEY": "k" * 16, "TOKENGROVE_METRICS_KEY": "m"}
    given = {**secrets, **settings_file(), "TOKENGROVE_HOST": "127.0.0.1"}
    migrate, server = container(spec, "migrate"), container(spec, "tokengrove")
    for each in (migrate, server):
        entries = {entry["name"]: entry for entry in each["env"]}
        assert entries["TOKENGROVE_DATABASE_URL"]["value"].endswith(":$(POSTGRES_PASSWORD)@postgres/tokengrove")
        entries["TOKENGROVE_DATABASE_URL"]["value"] = unmigrated_postgres_url
    server["env"] += [{"name": name, "value": given[name]} for name in settings_file()]  # of the ConfigMap
    machine.run(migrate, given)
    with machine.running(server, given) as process:
        url = address_of(process)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert (
                httpx.get(url + server[probe]["httpGet"]["path"], headers={"host": "10.1.2.3:8080"}).status_code == 200
            )
        admin = {"authorization": f"Bearer {secrets['TOKENGROVE_ADMIN_KEY']}"}
        started = httpx.post(f"{url}/rl/start_session", json={"task_id": "t"}, headers=admin).json()
        turn = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        path = httpx.URL(started["base_url"]).path
        assert httpx.post(f"{url}{path}/chat/completions", json=turn).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(spec["terminationGracePeriodSeconds"]) == 0


@pytest.mark.processes
def test_the_nightly_backup_is_a_file_of_the_day_and_old_ones_go(postgres_url: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0)
    folder = machine.path("backups")
    folder.mkdir()
    for name, days in (("2020-01-01.jsonl.zst", 15), ("2020-01-02.jsonl.zst", 13)):
        (folder / name).touch()
        moment = time.time() - days * 86_400 - 3_600
        os.utime(folder / name, (moment, moment))
    backup = container(pod("server/backup.yaml", "backup"), "backup")
    next(entry for entry in backup["env"] if entry["name"] == "TOKENGROVE_DATABASE_URL")["value"] = postgres_url
    machine.run(backup, {"POSTGRES_PASSWORD": "p"})
    kept = sorted(path.name for path in folder.iterdir())
    assert kept[0] == "2020-01-02.jsonl.zst" and re.fullmatch(r"20\d\d-\d\d-\d\d\.jsonl\.zst", kept[1])
    assert len(kept) == 2


@pytest.mark.processes
def test_the_sidecar_exports_before_the_pod_ends(tmp_path: Path) -> None:
    """SIGTERM comes to the sidecar once the agent has ended. One session is the agent's, one was left open."""
    spec = pod("sidecar.yaml", "episode")
    machine = Machine(tmp_path, free_port())
    for name in ("data", "trajectories"):
        machine.path(name).mkdir()
    server, agent = container(spec, "tokengrove"), container(spec, "agent")
    with machine.running(server, {"POD_NAME": POD_NAME}) as process:
        url = address_of(process)
        probe = server["startupProbe"]["exec"]["command"]
        machine.run({"command": probe[:2], "args": probe[2:]}, {})
        machine.run(agent, {"POD_NAME": POD_NAME})
        turn = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        httpx.post(f"{url}/left-open/v1/chat/completions", json=turn).raise_for_status()
        process.send_signal(signal.SIGTERM)
        assert process.wait(spec["terminationGracePeriodSeconds"]) == 0
    exported = machine.path("trajectories") / f"{POD_NAME}.jsonl.zst"
    restored = f"sqlite:///{tmp_path / 'restored.db'}"
    done, _ = import_all(restored, exported, Conflict.REFUSE, lambda _: None)
    assert (done.sessions, done.interactions) == (2, 2)


@pytest.mark.processes
def test_a_sidecar_whose_server_fails_ends_with_its_code_and_exports_nothing(tmp_path: Path) -> None:
    """So the kubelet starts the container again, on the same database."""
    machine = Machine(tmp_path, free_port())
    server = container(pod("sidecar.yaml", "episode"), "tokengrove")
    with machine.running(server, {"POD_NAME": POD_NAME}) as process:  # without /data
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 1, printed
    assert not machine.path("trajectories").exists()


def address_of(process: subprocess.Popen[str]) -> str:
    """The URL that a server prints once it listens."""
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        found = re.search(r" at (http://\S+)", line)
        if found is not None:
            return found[1]
    raise AssertionError(f"the server did not start:\n{printed}")
