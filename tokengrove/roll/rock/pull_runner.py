"""The runner for sandboxes that cannot reach this machine: it fetches the requests of the agent."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import httpx

from tokengrove.roll.rock.mailbox_model_service import DEFAULT_PORT, MailboxModelService
from tokengrove.roll.rock.model_service import SESSION_END
from tokengrove.roll.rock.rock_agent_runner import RockAgentRunner, new_job_id
from tokengrove.roll.runners import RequestError
from tokengrove.roll.values import EpisodeResult
from tokengrove.rollout.imports import load
from tokengrove.rollout.sandboxes.sandbox import Sandbox
from tokengrove.rollout.threads import in_thread

_PAUSE_S = 0.5
_CONVERSATION = ("model", "messages", "tools", "tool_choice", "stream", "stream_options")


class PullModeRunner(RockAgentRunner):
    """Runs a job whose agent calls a model service in its sandbox, and answers its requests one after another.

    It also reads these settings of `env_config.config`: `model_service_port` (28080) and `model_service_cls`, a class
    with the methods of `ModelService`, or its path, which is called with `port`. Its methods may be coroutine functions
    or plain functions.
    """

    model_service_cls: Callable[..., Any] = MailboxModelService

    def __init__(self, base_url: str, env_id: int, env_config: Any, **kwargs: Any) -> None:
        super().__init__(base_url, env_id, env_config, **kwargs)
        self._model_service_port = int(self.env_params.get("model_service_port", DEFAULT_PORT))
        if (path := self.env_params.get("model_service_cls")) is not None:
            self.model_service_cls = load(path) if isinstance(path, str) else path

    def run_job(self, seed: int) -> EpisodeResult:
        """Run the job of the seed's task; NoData if there are no more."""
        data_item = self._load_data_item(seed)
        if data_item is None:
            return EpisodeResult(status="NoData", score=0.0)
        job_id, instance_id = new_job_id("ms_harbor_job", data_item)
        task_config = self._build_task_config_from_data_item(data_item)
        metrics = self._run_async_job(self._run_pull_job(task_config, job_id), job_id, instance_id)
        return self._build_result_from_metrics(metrics)

    async def _run_pull_job(self, task_config: dict[str, Any], job_id: str) -> dict[str, Any]:
        """Submit the job, answer its requests until it ends, and return its metrics. The job is cleaned up."""
        config = self._build_job_config(task_config, job_id)
        service: Any = None

        async def begin(sandbox: Sandbox) -> None:
            nonlocal service
            await self._close_service(service)  # of a failed attempt
            service = self.model_service_cls(port=self._model_service_port)
            config.agents[0].kwargs["api_base"] = await _called(service.start, sandbox)

        job = self.job_cls(config, self.sandbox_cls, on_sandbox_ready=begin)
        try:
            await self._attempted("submit the job", job.submit)
            return await self._answered(job, service, task_config)
        finally:
            await self._close_service(service)
            await self._closed("the job's sandbox", job.close)

    async def _answered(self, job: Any, service: Any, task_config: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the requests of a job while it runs; return its metrics. Raises errors of answering."""
        with httpx.Client(timeout=self.http_timeout) as client:
            watching = asyncio.ensure_future(_watch(service, job.agent))
            answering = asyncio.ensure_future(self._inference_loop(service, client))
            waiting = asyncio.ensure_future(self._metrics_of(job, task_config))
            try:
                await asyncio.wait((answering, waiting), return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    answering.result()
                return await waiting
            finally:
                for task in (watching, answering, waiting):
                    task.cancel()
                await asyncio.gather(watching, answering, waiting, return_exceptions=True)

    async def _close_service(self, service: Any) -> None:
        if hasattr(service, "close"):
            await self._closed("the model service", partial(_called, service.close))

    async def _inference_loop(self, model_service: Any, http_client: Any) -> None:
        """Fetch the agent's requests and answer them until SESSION_END."""
        index, payload = 0, None
        while True:
            call = partial(_called, model_service.anti_call_llm, index=index, response_payload=payload)
            raw = (await self._attempted(f"get request {index + 1} of the agent", call) or "").strip()
            if SESSION_END in raw[: 2 * len(SESSION_END)]:
                return
            if not raw:
                await asyncio.sleep(_PAUSE_S)
                continue
            payload = json.dumps(await self._response_to(raw, http_client), ensure_ascii=False)
            index += 1

    async def _response_to(self, raw: str, http_client: Any) -> dict[str, Any]:
        """The chat completion that answers a request, or `{"error": {...}}`, which the agent receives as an error."""
        request = self._parse_llm_request(raw, 0)
        if request is None:
            return self._make_error_response("the request is not a JSON object", code="invalid_request")
        messages, tools = request.get("messages", []), request.get("tools")
        choice = request.get("tool_choice", "auto")
        ask = partial(self._llm_request, http_client, messages, tools, choice)
        try:
            return await in_thread(partial(ask, **self._further(request)))
        except RequestError as error:
            return self._make_error_response(error.message, code=error.code)
        except Exception as error:
            self.logger.warning("a request of the agent failed: %s", error)
            return self._make_error_response(f"{type(error).__name__}: {error}")

    def _further(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The agent's fields beside the conversation, for a `_llm_request` that accepts them; ROLL's does not."""
        parameters = inspect.signature(self._llm_request).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return {}
        return {name: value for name, value in request.items() if name not in _CONVERSATION}

    def _parse_llm_request(self, raw_output: str, index: int) -> dict[str, Any] | None:
        """The request in the result of a model service; None if it is not a JSON object."""
        try:
            request = json.loads(raw_output)
        except (ValueError, RecursionError):
            return None
        return request if isinstance(request, dict) else None

    @staticmethod
    def _make_error_response(error_msg: str, code: str = "") -> dict[str, Any]:
        """An error in OpenAI's format. ROLL's agents get an answer of status 200 with the error as its text."""
        return {"error": {"message": error_msg, "type": "api_error", "code": code or None}}


async def _watch(service: Any, agent: Any) -> None:
    """Pass the agent to the service: its process, or its process id if the service's parameter is `pid`."""
    if "pid" in inspect.signature(service.watch_agent).parameters:
        await _called(service.watch_agent, pid=str(agent.pid))
    else:
        await _called(service.watch_agent, agent)


async def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a coroutine function here, or a plain function in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await in_thread(partial(function, *args, **kwargs))
    return await result if inspect.isawaitable(result) else result
