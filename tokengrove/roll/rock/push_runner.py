"""The runner whose agent calls the server itself, at its public address."""

from __future__ import annotations

from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.rock.rock_agent_runner import RockAgentRunner, new_job_id
from tokengrove.roll.values import EpisodeResult


class PushModeRunner(RockAgentRunner):
    """Runs a job whose agent finds the address and the key of its session in its environment."""

    def run_job(self, seed: int) -> EpisodeResult:
        """Run the job of the seed's task; NoData if there are no more."""
        if self.http_client is not None and not self.env_params.get("infer_callback_url"):
            raise InvalidRequest(
                "the agent of PushModeRunner is another process, which cannot reach a server in this one: "
                "start `tokengrove serve` and give its address, or use PullModeRunner",
                param="base_url",
            )
        data_item = self._load_data_item(seed)
        if data_item is None:
            return EpisodeResult(status="NoData", score=0.0)
        job_id, instance_id = new_job_id("harbor_job", data_item)
        task_config = self._build_task_config_from_data_item(data_item)
        task_config["infer_callback_url"] = self.infer_callback_url
        metrics = self._run_async_job(self._run_harbor_job(task_config, job_id), job_id, instance_id)
        return self._build_result_from_metrics(metrics)

    async def _run_harbor_job(self, task_config: dict[str, Any], job_id: str) -> dict[str, Any]:
        """Submit the job, wait for it, and return its metrics. The job is cleaned up."""
        job = self.job_cls(self._build_job_config(task_config, job_id), self.sandbox_cls)
        try:
            await self._attempted("submit the job", job.submit)
            return await self._metrics_of(job, task_config)
        finally:
            await self._closed("the job's sandbox", job.close)
