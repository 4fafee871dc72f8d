"""Places in which programs run: a folder of this machine, or whatever a subclass of `Sandbox` makes of it.

What is started in a sandbox is gone after its `stop`, and no sandbox sees the files of another.
"""

from tokengrove.rollout.sandboxes.command_sandbox import CommandSandbox
from tokengrove.rollout.sandboxes.local_process_sandbox import LocalProcessSandbox
from tokengrove.rollout.sandboxes.sandbox import Command, CommandResult, Sandbox, SandboxProcess

__all__ = ["Command", "CommandResult", "CommandSandbox", "LocalProcessSandbox", "Sandbox", "SandboxProcess"]
