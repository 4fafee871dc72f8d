"""Pods of a Kubernetes cluster: that of the kubeconfig (KUBECONFIG), or inside a pod its own cluster.

The role needs `create`, `get`, `list` and `delete` of `pods`, and `create` and `get` of `pods/exec`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokengrove.errors import ConfigurationError
from tokengrove.options.option import option
from tokengrove.rollout.sandboxes.remote_sandbox import OWNER
from tokengrove.rollout.sandboxes.remote_settings import RemoteSettings
from tokengrove.rollout.sandboxes.remote_shell import ALIVE, REQUEST_S, RemoteShell

LOOK_S = 0.5
_FRAME = 64 * 1024
_CONTAINER = "sandbox"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings(RemoteSettings):
    """Settings of a pod. Its requests of CPU and memory are also its limits."""

    image: str | None = option(None, "Image of the container.")
    namespace: str = option("default", "Namespace of the pods.")
    context: str | None = option(None, "Context of the kubeconfig.", otherwise="the current one")
    cpu: float | None = option(None, "CPU cores.", above=0)
    memory_gib: float | None = option(None, "GiB of memory.", above=0)
    runtime_class: str | None = option(None, "Runtime class, such as gvisor.")
    service_account: str | None = option(None, "Service account, for image pull secrets; its token is not mounted.")


class KubernetesSandbox(RemoteShell):
    """A pod, whose commands are run through the API server (`exec`)."""

    extra = "kubernetes"
    kind = KubernetesSettings
    account = ("namespace", "context")
    required = ("image",)
    settings: KubernetesSettings

    def connect(self) -> None:
        import kubernetes

        self._sdk: Any = kubernetes
        self._pod_name = self._name
        self._container: str | None = _CONTAINER
        try:
            self._configuration = _configuration(self.settings.context, os.environ.get("KUBECONFIG"))
        except kubernetes.config.ConfigException as error:
            raise ConfigurationError(f"KubernetesSandbox finds no cluster: {error}") from error

    @property
    def _name(self) -> str:
        return f"tokengrove-{self._mark}"

    def _client(self) -> Any:
        """A client of its own for each call: `stream` changes the client while it connects."""
        return self._sdk.client.ApiClient(self._configuration)

    def _api(self) -> Any:
        return self._sdk.client.CoreV1Api(self._client())

    def create(self, labels: Mapping[str, str]) -> None:
        settings = self.settings
        try:
            self._api().create_namespaced_pod(settings.namespace, self._pod(labels), _request_timeout=REQUEST_S)
        except self._sdk.client.ApiException as error:
            if error.status != 409:  # an earlier request has created it, and its answer was lost
                raise
        self._wait_until_ready()

    def _pod(self, labels: Mapping[str, str]) -> dict[str, Any]:
        settings = self.settings
        wanted = {
            "cpu": None if settings.cpu is None else f"{settings.cpu:g}",
            "memory": None if settings.memory_gib is None else f"{math.ceil(settings.memory_gib * 1024)}Mi",
        }
        resources = {name: value for name, value in wanted.items() if value is not None}
        container = {
            **{"name": _CONTAINER, "image": settings.image, "command": ["/bin/sh", "-c", ALIVE]},
            "resources": {"requests": resources, "limits": resources},
        }
        spec = {
            **{"restartPolicy": "Never", "containers": [container], "terminationGracePeriodSeconds": 0},
            **{"activeDeadlineSeconds": int(settings.max_lifetime_s), "enableServiceLinks": False},
            **{"automountServiceAccountToken": False, "runtimeClassName": settings.runtime_class},
            "serviceAccountName": settings.service_account,
        }
        given = {name: value for name, value in spec.items() if value is not None}
        return {"metadata": {"name": self._name, "labels": dict(labels)}, "spec": given}

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + self.settings.startup_timeout
        while True:
            status = self._api().read_namespaced_pod(self._name, self.settings.namespace).status
            state = next((each for each in status.container_statuses or () if each.name == _CONTAINER), None)
            if state is not None and state.ready:
                return
            waiting = None if state is None else state.state.waiting
            why = status.message or (status.phase if waiting is None else f"{waiting.reason}: {waiting.message}")
            if status.phase in ("Failed", "Succeeded") or time.monotonic() > until:
                raise RuntimeError(f"the pod {self._name} does not run ({why})")
            time.sleep(LOOK_S)

    def shell(self, script: str, stdin: bytes, limit_s: float) -> tuple[int, bytes, bytes]:
        connection = self._sdk.stream.stream(
            self._api().connect_get_namespaced_pod_exec,
            self._pod_name,
            self.settings.namespace,
            command=["/bin/sh", "-c", script],
            **({} if self._container is None else {"container": self._container}),
            **{"stdin": True, "stdout": True, "stderr": True, "tty": False},
            _preload_content=False,
            binary=True,
        )
        try:
            for at in range(0, len(stdin), _FRAME):
                connection.write_stdin(stdin[at : at + _FRAME])
            until = time.monotonic() + limit_s
            while connection.is_open():
                connection.update(timeout=max(0.0, until - time.monotonic()))
                if time.monotonic() > until:
                    raise TimeoutError(f"a request to the pod {self._pod_name} has not ended within {limit_s:g} s")
            out, err = (connection.read_channel(channel) for channel in (1, 2))
            if not connection.peek_channel(3):
                raise ConnectionError("the connection to the pod ended without an exit code")
            return connection.returncode, out, err
        finally:
            connection.close()

    def delete(self) -> None:
        self._delete(self._name)

    def delete_all(self, owner: str) -> int:
        pods = self._api().list_namespaced_pod(self.settings.namespace, label_selector=f"{OWNER}={owner}").items
        left = [pod.metadata.name for pod in pods if pod.metadata.deletion_timestamp is None]
        for name in left:
            self._delete(name)
        return len(left)

    def _delete(self, name: str) -> None:
        try:
            self._request_deletion(name)
        except self._sdk.client.ApiException as error:
            if error.status != 404:
                raise

    def _request_deletion(self, name: str) -> None:
        self._api().delete_namespaced_pod(
            name, self.settings.namespace, grace_period_seconds=0, _request_timeout=REQUEST_S
        )

    def is_transient(self, error: Exception) -> bool:
        if isinstance(error, self._sdk.client.ApiException):
            status = error.status or 0  # 0: `exec` was not connected, for the reason in the text
            return status == 429 or status >= 500 or (status == 0 and "404" not in str(error.reason))
        # The two libraries below the client, whose errors are subclasses of Exception only.
        return isinstance(error, OSError) or type(error).__module__.startswith(("websocket", "urllib3"))


@cache
def _configuration(context: str | None, kubeconfig: str | None) -> Any:
    """The address and credentials of a cluster, once per process: reading them may run a program."""
    from kubernetes import client, config

    found = client.Configuration()
    if context is None and kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config(client_configuration=found)
    else:
        # The library reads the variable only when it is imported.
        config.load_kube_config(kubeconfig, context=context, client_configuration=found)
    return found
