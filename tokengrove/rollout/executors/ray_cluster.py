"""The Ray cluster on which episodes are played: connecting to it, and what its workers need of this program."""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.executors.options import RayOptions

logger = logging.getLogger(__name__)


def connect(options: RayOptions) -> bool:
    """Connect this program to the cluster; one that it has joined already is used. Return whether it was joined here.

    Raises ConfigurationError without the package, and without a cluster at the address.
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
            "--executor ray finds no Ray cluster on this machine: give its address (--ray-address HOST:6379 or "
            "RAY_ADDRESS), or --ray-address local, which starts one here for the run"
        )
    return f"--ray-address {address}: {error}"


def _warn_of_size(options: RayOptions, nodes: list[dict[str, Any]]) -> None:
    most = max((node["Resources"].get("CPU", 0.0) for node in nodes if node["Alive"]), default=0.0)
    if most < options.num_cpus:
        logger.warning(
            "no node of the Ray cluster has %g CPUs (--ray-cpus), the largest has %g: nothing is played before "
            "one joins",
            options.num_cpus,
            most,
        )


def runtime_env(options: RayOptions) -> dict[str, Any]:
    """What Ray makes of each worker: this program's folders of modules on its path, and what the options say."""
    env: dict[str, Any] = {**options.runtime_env}
    variables: Mapping[str, str] = env.get("env_vars", {})
    if "PYTHONPATH" not in variables:
        env["env_vars"] = {**variables, "PYTHONPATH": os.pathsep.join(_module_folders())}
    return env


def _module_folders() -> list[str]:
    """The folders of `sys.path` that are not of the Python installation, which differs between machines."""
    installed = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    folders = [Path(entry or os.getcwd()).resolve() for entry in sys.path]
    own = [folder for folder in folders if folder.is_dir() and not installed.intersection((folder, *folder.parents))]
    return list(dict.fromkeys(map(str, own)))


def check_reachable(url: str, nodes: list[dict[str, Any]], here: str) -> None:
    """Raise ConfigurationError if `url` is of this machine only and the cluster has others. `here`: its address."""
    host = urlsplit(url).hostname or ""
    others = sorted({node["NodeManagerAddress"] for node in nodes if node["Alive"]} - {here, "127.0.0.1"})
    if others and _is_loopback(host):
        raise ConfigurationError(
            f"{url} is an address of this machine only, and the Ray cluster has others ({', '.join(others[:3])}): "
            f"start the server with --host 0.0.0.0 and an admin key, and give --url http://{here}:PORT"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
