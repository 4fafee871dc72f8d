"""Episodes on a Ray cluster: actors, each of which plays several episodes at once and starts when it is needed.

Ray gets calls only for episodes that have a place. Other episodes wait in this process, so that no calls pile up in
Ray.
"""

from __future__ import annotations

import asyncio
import logging

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult
from tokengrove.rollout.executors.options import RayOptions
from tokengrove.rollout.executors.places import Shape
from tokengrove.rollout.executors.pooled import PooledExecutor
from tokengrove.rollout.executors.ray_cluster import check_reachable, connect, runtime_env
from tokengrove.rollout.executors.ray_host import RayHost
from tokengrove.rollout.executors.results import failed

logger = logging.getLogger(__name__)


class RayExecutor(PooledExecutor):
    """Connects to the cluster when it is created. When closed, it disconnects, unless the program was connected before.

    Raises ConfigurationError if Ray is not installed, and if there is no cluster.
    """

    def __init__(self, concurrency: int, options: RayOptions) -> None:
        self._joined = connect(options)
        self._checked: set[str] = set()
        places = min(concurrency, options.episodes_per_worker)
        # Spread evenly over the nodes, so that a node that fails affects few episodes.
        resources = {
            "num_cpus": options.num_cpus,
            "runtime_env": runtime_env(options),
            "scheduling_strategy": "SPREAD",
        }
        shape = Shape(-(-concurrency // places), places, spread=False)
        super().__init__(concurrency, lambda: RayHost(places, resources), shape)

    def check(self, url: str) -> None:
        """Raise ConfigurationError if workers on other machines could not reach the server at `url`."""
        import ray
        from ray.util import get_node_ip_address

        check_reachable(url, ray.nodes(), get_node_ip_address())

    async def play(self, plan: EpisodePlan) -> EpisodeResult:
        if plan.server.url not in self._checked:
            try:
                self.check(plan.server.url)
            except ConfigurationError as error:
                return failed(plan, "server", str(error))
            self._checked.add(plan.server.url)
        return await super().play(plan)

    async def close(self) -> None:
        await super().close()
        if self._joined:
            import ray

            self._joined = False
            await asyncio.to_thread(ray.shutdown)
