"""TRL's asynchronous GRPO with episodes that are played here: a worker, a weight transfer, sessions for TRL's worker.

Experimental, like that trainer: it may change in a minor version.
"""

from tokengrove.trl.sessions import AgentSession, SessionFactory
from tokengrove.trl.weights import WeightTransfer
from tokengrove.trl.without_gpu import train_without_gpu
from tokengrove.trl.worker import AgentWorker

__all__ = ["AgentSession", "AgentWorker", "SessionFactory", "WeightTransfer", "train_without_gpu"]
