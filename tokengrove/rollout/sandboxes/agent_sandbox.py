"""Sandboxes of agent-sandbox, a controller for Kubernetes, which keeps pods ready in warm pools.

Each sandbox is a SandboxClaim of a warm pool. Its commands are run through the API server, so neither the router nor
the runtime of agent-sandbox is needed. The role needs `create`, `get`, `list` and `delete` of `sandboxclaims`, `get` of
`sandboxes`, and `create` and `get` of `pods/exec`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tokengrove.options.option import option
from tokengrove.rollout.sandboxes.kubernetes_sandbox import LOOK_S, KubernetesSandbox
from tokengrove.rollout.sandboxes.remote_sandbox import OWNER
from tokengrove.rollout.sandboxes.remote_settings import RemoteSettings
from tokengrove.rollout.sandboxes.remote_shell import REQUEST_S

_CLAIMS = {"group": "extensions.agents.x-k8s.io", "version": "v1beta1", "plural": "sandboxclaims"}
_SANDBOXES = {"group": "agents.x-k8s.io", "version": "v1beta1", "plural": "sandboxes"}
_POD_NAME = "agents.x-k8s.io/pod-name"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSandboxSettings(RemoteSettings):
    """Settings of a claim. Image, CPU and memory are those of the pool's template."""

    warm_pool: str | None = option(None, "Name of the SandboxWarmPool.")
    namespace: str = option("default", "Namespace of the pool and the claims.")
    context: str | None = option(None, "Context of the kubeconfig.", otherwise="the current one")
    container: str | None = option(None, "Container of the commands.", otherwise="the pod's default")


class AgentSandbox(KubernetesSandbox):
    """A SandboxClaim, whose expiry and deletion also delete the pod."""

    kind = AgentSandboxSettings  # type: ignore[assignment]  # a claim has none of a pod's settings
    required = ("warm_pool",)
    settings: AgentSandboxSettings  # type: ignore[assignment]

    def create(self, labels: Mapping[str, str]) -> None:
        settings = self.settings
        end = datetime.now(UTC) + timedelta(seconds=settings.max_lifetime_s)
        lifecycle = {"shutdownTime": end.strftime("%Y-%m-%dT%H:%M:%SZ"), "shutdownPolicy": "Delete"}
        claim = {
            **{"apiVersion": f"{_CLAIMS['group']}/{_CLAIMS['version']}", "kind": "SandboxClaim"},
            "metadata": {"name": self._name, "labels": dict(labels)},
            "spec": {"warmPoolRef": {"name": settings.warm_pool}, "lifecycle": lifecycle},
        }
        try:
            self._objects().create_namespaced_custom_object(
                namespace=settings.namespace, body=claim, **_CLAIMS, _request_timeout=REQUEST_S
            )
        except self._sdk.client.ApiException as error:
            if error.status != 409:  # an earlier request has created it, and its answer was lost
                raise
        name = self._ready_sandbox()
        sandbox = self._object(_SANDBOXES, name)
        self._pod_name = (sandbox["metadata"].get("annotations") or {}).get(_POD_NAME) or name
        self._container = settings.container

    def _ready_sandbox(self) -> str:
        """The name of the sandbox that the claim has got, once it is ready."""
        until = time.monotonic() + self.settings.startup_timeout
        while True:
            status = self._object(_CLAIMS, self._name).get("status") or {}
            conditions: dict[str, dict[str, str]] = {each["type"]: each for each in status.get("conditions", ())}
            ready = conditions.get("Ready", {})
            name = (status.get("sandbox") or {}).get("name")
            if ready.get("status") == "True" and name:
                return str(name)
            if time.monotonic() > until:
                why = f"{ready.get('reason', 'no status')}: {ready.get('message', '')}"
                raise RuntimeError(f"the claim {self._name} got no sandbox ({why})")
            time.sleep(LOOK_S)

    def delete_all(self, owner: str) -> int:
        found = self._objects().list_namespaced_custom_object(
            namespace=self.settings.namespace, label_selector=f"{OWNER}={owner}", **_CLAIMS
        )
        names = [each["metadata"] for each in found["items"]]
        left = [about["name"] for about in names if about.get("deletionTimestamp") is None]
        for name in left:
            self._delete(name)
        return len(left)

    def _request_deletion(self, name: str) -> None:
        self._objects().delete_namespaced_custom_object(
            namespace=self.settings.namespace, name=name, **_CLAIMS, _request_timeout=REQUEST_S
        )

    def _object(self, kind: Mapping[str, str], name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._objects().get_namespaced_custom_object(
            namespace=self.settings.namespace, name=name, **kind
        )
        return found

    def _objects(self) -> Any:
        return self._sdk.client.CustomObjectsApi(self._client())
