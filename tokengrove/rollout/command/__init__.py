"""Any program as an agent: it runs unmodified in its own working folder, and a verifier rewards the result.

A command gets the addresses and the agent's key of its session, but neither the control key nor the rest of its
caller's environment. The verifier's files are copied, and its reward is read, only when no process of the command is
left.
"""

from tokengrove.rollout.command.agent import CommandAgent
from tokengrove.rollout.command_options import CommandOptions

__all__ = ["CommandAgent", "CommandOptions"]
