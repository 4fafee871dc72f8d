"""The client of Kubernetes against a stand-in of an API server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.conformance.sandboxes.kubernetes_service import KEY, application
from tests.conformance.sandboxes.machines import Machines, served
from tests.conformance.sandboxes.provider import Place, ProviderContract
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.sandboxes.by_name import sandbox_class

pytestmark = pytest.mark.clients


def kubeconfig(url: str) -> str:
    """A file with one cluster. JSON is YAML."""
    context = {"name": "here", "context": {"cluster": "here", "user": "here"}}
    return json.dumps(
        {
            **{"apiVersion": "v1", "kind": "Config", "current-context": "here", "contexts": [context]},
            "clusters": [{"name": "here", "cluster": {"server": url}}],
            "users": [{"name": "here", "user": {"token": KEY}}],
        }
    )


def until(lifecycle: dict[str, str]) -> float:
    """The seconds until a claim ends, to the next ten."""
    assert lifecycle["shutdownPolicy"] == "Delete"
    end = datetime.fromisoformat(lifecycle["shutdownTime"])
    return 10.0 * math.ceil((end - datetime.now(UTC)).total_seconds() / 10)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Place]:
    machines = Machines(tmp_path / "pods")
    claims = request.cls is TestAgentSandbox
    settings = {"warm_pool": "pool", "namespace": "agents"} if claims else {"image": "debian", "namespace": "agents"}
    with served(application(machines)) as url:
        (tmp_path / "config").write_text(kubeconfig(url))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        yield Place(
            "agent-sandbox" if claims else "kubernetes",
            machines,
            settings,
            lifetime=lambda asked: (
                until(asked["pod"]["spec"]["lifecycle"])
                if claims
                else float(asked["pod"]["spec"]["activeDeadlineSeconds"])
            ),
            labels=lambda asked: dict(asked["pod"]["metadata"]["labels"]),
            text=json.dumps({"max_concurrent": 4, **settings}),
        )


class TestAgentSandbox(ProviderContract):
    """A claim of a warm pool."""


class TestKubernetes(ProviderContract):
    async def test_a_pod_has_limits_and_no_token_of_the_cluster(self, place: Place) -> None:
        sandbox = place.sandbox(cpu=0.5, memory_gib=1.5, runtime_class="gvisor")
        await sandbox.start()
        spec = place.machines.asked[0]["pod"]["spec"]
        (container,) = spec["containers"]
        assert container["resources"]["limits"] == {"cpu": "0.5", "memory": "1536Mi"}
        assert (spec["runtimeClassName"], spec["automountServiceAccountToken"]) == ("gvisor", False)
        assert (container["image"], place.machines.asked[0]["namespace"]) == ("debian", "agents")
        await sandbox.stop()

    async def test_a_variable_that_a_shell_cannot_have_is_refused(self, place: Place) -> None:
        sandbox = place.sandbox()
        await sandbox.start()
        with pytest.raises(ConfigurationError, match="'a-b' cannot be the name of a variable"):
            await sandbox.run("true", {"a-b": "x"})
        await sandbox.stop()


def test_a_missing_image_is_named() -> None:
    with pytest.raises(ConfigurationError, match="needs image"):
        sandbox_class("kubernetes")({"max_concurrent": 1})


def test_a_missing_cluster_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(ConfigurationError, match="finds no cluster"):
        sandbox_class("kubernetes")({"max_concurrent": 1, "image": "debian"})
