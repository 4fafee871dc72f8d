"""What a trainer may give as its workflow: a workflow or an agent, as an instance, a class, or the name of one."""

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
    """Return an object with `arun_episode(engine, data)` for what a trainer was given, by AReaL's rules.

    A name (`package.module.Name` or `package.module:Name`) is imported. A class is called with `workflow_kwargs`; for
    an instance they are left out, with a warning. What has `arun_episode` is a workflow; anything else is an agent, for
    `OpenAIProxyWorkflow(agent=..., proxy_addr=proxy_addr, **options)`. None stands for mode `online`. With a
    `group_size` above 1 the workflow is run so many times at once (`GroupedRolloutWorkflow`).

    Raises ValueError for a name that cannot be imported, and for an agent without `proxy_addr` or `client`; otherwise
    as OpenAIProxyWorkflow.
    """
    found = _instance(_imported(workflow), workflow_kwargs)
    if not callable(getattr(found, "arun_episode", None)):
        found = _wrapped(found, proxy_addr, options)
    return GroupedRolloutWorkflow(found, group_size) if group_size > 1 else found


def _imported(workflow: Any) -> Any:
    """What a name stands for, which may be another name; anything else as it is."""
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
        raise ValueError(f"proxy_addr is required for agent workflows, the server's address. Got workflow={agent!r}")
    if agent is None and options.get("mode") != "online":
        raise ValueError("workflow is None, which stands for mode='online'. Provide a workflow or set the mode")
    return OpenAIProxyWorkflow(agent=agent, proxy_addr=proxy_addr or "", **options)
