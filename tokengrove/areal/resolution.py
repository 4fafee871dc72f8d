"""The workflow that a trainer is given: a workflow or an agent, as an instance, a class, or an import path."""

from __future__ import annotations

import logging
from typing import Any

from tokengrove.areal.grouped import GroupedRolloutWorkflow
from tokengrove.areal.workflow import OpenAIProxyWorkflow
from tokengrove.errors import InvalidRequest
from tokengrove.rollout import imports

logger = logging.getLogger(__name__)


def resolve_workflow(
    workflow: Any,
    workflow_kwargs: dict[str, Any] | None = None,
    group_size: int = 1,
    proxy_addr: str | None = None,
    **options: Any,
) -> Any:
    """An object with `arun_episode(engine, data)` for the workflow or agent of a trainer, by AReaL's rules.

    A string (`package.module.Name` or `package.module:Name`) is imported. A class is called with `workflow_kwargs`; for
    an instance they are ignored, with a warning. An object with `arun_episode` is a workflow; any other object is an
    agent, and becomes `OpenAIProxyWorkflow(agent=..., proxy_addr=proxy_addr, **options)`. None means mode `online`. A
    `group_size` above 1 runs the workflow that many times concurrently (`GroupedRolloutWorkflow`).

    Raises ValueError for a string that cannot be imported, and for an agent without `proxy_addr` or `client`; otherwise
    the errors of OpenAIProxyWorkflow.
    """
    found = _instance(_imported(workflow), workflow_kwargs)
    if not callable(getattr(found, "arun_episode", None)):
        found = _wrapped(found, proxy_addr, options)
    return GroupedRolloutWorkflow(found, group_size) if group_size > 1 else found


def _imported(workflow: Any) -> Any:
    """The object that a string names, which may be another string; any other value unchanged."""
    while isinstance(workflow, str):
        try:
            workflow = imports.load(workflow)
        except (InvalidRequest, ImportError) as error:
            raise ValueError(f"Failed to import workflow from string {workflow!r}: {error}") from error
    return workflow


def _instance(found: Any, arguments: dict[str, Any] | None) -> Any:
    if isinstance(found, type):
        return found(**(arguments or {}))
    if arguments is not None:
        logger.warning("workflow_kwargs is ignored when workflow is already an instance")
    return found


def _wrapped(agent: Any, proxy_addr: str | None, options: dict[str, Any]) -> OpenAIProxyWorkflow:
    if proxy_addr is None and options.get("client") is None:
        raise ValueError(f"proxy_addr is required for agent workflows: the server's address. Got workflow={agent!r}")
    if agent is None and options.get("mode") != "online":
        raise ValueError("workflow is None, which requires mode='online'. Provide a workflow or set the mode")
    return OpenAIProxyWorkflow(agent=agent, proxy_addr=proxy_addr or "", **options)
