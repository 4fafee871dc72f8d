"""The Ray cluster that plays episodes: the connection to it, and the environment of its workers."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokengrove.errors import ConfigurationError
from tokengrove.loopback import is_loopback
from tokengrove.rollout.executors.options import RayOptions

logger = logging.getLogger(__name__)


def connect(options: RayOptions) -> bool:
    """Connect this program to the cluster, unless it is already connected to one. Return whether it was connected here.

    Raises ConfigurationError if Ray is not installed, and if there is no cluster at the address.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigurationError("--executor ray needs the package ray: pip install '.[ray]'") from None
    if joined := not ray.is_initialized():
        address = options.address or os.environ.get("RAY_ADDRESS") or "auto"
        try:
            ray.init(address=address, log_to_driver=True, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigurationError(_no_cluster(options, address, error)) from error
    _warn_of_size(options, ray.nodes())
    return joined


def _no_cluster(options: RayOptions, address: str, error: Exception) -> str:
    if address == "auto" and options.address is None:
        return (
            "--executor ray found no Ray cluster on this machine: give its address with --ray-address HOST:6379 or "
            "RAY_ADDRESS, or start one here for the run with --ray-address local"
        )
    return f"--ray-address {address}: {error}"


def _warn_of_size(options: RayOptions, nodes: list[dict[str, Any]]) -> None:
    most = max((node["Resources"].get("CPU", 0.0) for node in nodes if node["Alive"]), default=0.0)
    if most < options.num_cpus:
        logger.warning(
            "no node of the Ray cluster has %g CPUs (--ray-cpus), and the largest has %g: no episode starts before "
            "such a node joins",
            options.num_cpus,
            most,
        )


def runtime_env(options: RayOptions) -> dict[str, Any]:
    """The runtime environment of workers: that of the options, with this program's module folders in PYTHONPATH."""
    env: dict[str, Any] = {**options.runtime_env}
    variables: Mapping[str, str] = env.get("env_vars", {})
    if "PYTHONPATH" not in variables:
        env["env_vars"] = {**variables, "PYTHONPATH": os.pathsep.join(_module_folders())}
    return env


def _module_folders() -> list[str]:
    """The folders of `sys.path` outside the Python installation, which may differ between machines."""
    installed = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    folders = [Path(entry or os.getcwd()).resolve() for entry in sys.path]
    own = [folder for folder in folders if folder.is_dir() and not installed.intersection((folder, *folder.parents))]
    return list(dict.fromkeys(map(str, own)))


def check_reachable(url: str, nodes: list[dict[str, Any]], here: str) -> None:
    """Raise ConfigurationError if `url` is a loopback address and the cluster has other machines.

    `here`: the address of this machine.
    """
    others = sorted({node["NodeManagerAddress"] for node in nodes if node["Alive"]} - {here, "127.0.0.1"})
    if others and is_loopback(url):
        raise ConfigurationError(
            f"{url} is reachable from this machine only, and the Ray cluster has others ({', '.join(others[:3])}): "
            f"start the server with --host 0.0.0.0 and an admin key, and give --url http://{here}:PORT"
        )
