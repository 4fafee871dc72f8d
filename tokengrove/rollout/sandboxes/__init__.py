"""Sandboxes for programs: a folder of this machine, or any place that a subclass of `Sandbox` provides.

Each sandbox has its own files, and `stop` ends its processes and removes its files.
"""

from tokengrove.rollout.sandboxes.command_sandbox import CommandSandbox
from tokengrove.rollout.sandboxes.local_process_sandbox import LocalProcessSandbox
from tokengrove.rollout.sandboxes.sandbox import Command, CommandResult, Sandbox, SandboxProcess

__all__ = ["Command", "CommandResult", "CommandSandbox", "LocalProcessSandbox", "Sandbox", "SandboxProcess"]
