"""Creates the executor that the options describe."""

from __future__ import annotations

from tokengrove.rollout.executors.executor import Executor
from tokengrove.rollout.executors.local import LocalExecutor
from tokengrove.rollout.executors.open_files import allow_open_files
from tokengrove.rollout.executors.options import ExecutorOptions, RayOptions
from tokengrove.rollout.executors.places import Shape
from tokengrove.rollout.executors.pooled import PooledExecutor
from tokengrove.rollout.executors.process_host import ProcessHost
from tokengrove.rollout.script import stop_import


def executor_for(options: ExecutorOptions, server_url: str | None = None) -> Executor:
    """Create the executor. With kind `ray`, it connects to the cluster; nothing else is started before the first
    episode.

    `server_url`: the server of its sessions, to check in advance that Ray workers can reach it. Raises
    ConfigurationError if they cannot, if Ray is not installed, and if there is no cluster.
    """
    stop_import()
    if options.kind == "local":
        allow_open_files(options.concurrency)
        return LocalExecutor(options.concurrency)
    if options.kind == "ray":
        return _ray_executor(options, server_url)
    processes = options.processes
    shape = Shape(processes, -(-options.concurrency // processes))
    return PooledExecutor(options.concurrency, ProcessHost, shape)


def _ray_executor(options: ExecutorOptions, server_url: str | None) -> Executor:
    from tokengrove.rollout.executors.ray_executor import RayExecutor

    executor = RayExecutor(options.concurrency, options.ray or RayOptions())
    if server_url is not None:
        executor.check(server_url)
    return executor
