"""Agents that are programs in a sandbox: tasks by seed, jobs, and the two ways in which such an agent calls the model.

The sandbox is this machine, or a subclass of `Sandbox`. Rock's SDK is not needed.
"""

from tokengrove.roll.rock.global_dataset import (
    GlobalDataset,
    place_for_others,
    reset_datasets,
    shared_dataset,
    traverse_together,
)
from tokengrove.roll.rock.job import Job
from tokengrove.roll.rock.job_config import JobConfig
from tokengrove.roll.rock.job_result import JobResult, Span, TrialResult, VerifierResult
from tokengrove.roll.rock.mailbox_model_service import MailboxModelService
from tokengrove.roll.rock.model_service import SESSION_END, ModelService
from tokengrove.roll.rock.pull_runner import PullModeRunner
from tokengrove.roll.rock.push_runner import PushModeRunner
from tokengrove.roll.rock.rock_agent_runner import RockAgentRunner
from tokengrove.rollout.sandboxes.command_sandbox import CommandSandbox
from tokengrove.rollout.sandboxes.local_process_sandbox import LocalProcessSandbox
from tokengrove.rollout.sandboxes.sandbox import Command, CommandResult, Sandbox, SandboxProcess

__all__ = [
    "SESSION_END",
    "Command",
    "CommandResult",
    "CommandSandbox",
    "GlobalDataset",
    "Job",
    "JobConfig",
    "JobResult",
    "LocalProcessSandbox",
    "MailboxModelService",
    "ModelService",
    "PullModeRunner",
    "PushModeRunner",
    "RockAgentRunner",
    "Sandbox",
    "SandboxProcess",
    "Span",
    "TrialResult",
    "VerifierResult",
    "place_for_others",
    "reset_datasets",
    "shared_dataset",
    "traverse_together",
]
