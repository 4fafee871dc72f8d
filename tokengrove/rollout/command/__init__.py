"""Any program as an agent: it runs unmodified in a working folder of its own, and a verifier rewards what it left.

A command sees the addresses and the key of its session, never the control key, nor what else its caller's environment
holds. The verifier's files are put in place, and its reward is read, when no process of the command is left.
"""

from tokengrove.rollout.command.agent import CommandAgent
from tokengrove.rollout.command_options import CommandOptions

__all__ = ["CommandAgent", "CommandOptions"]
