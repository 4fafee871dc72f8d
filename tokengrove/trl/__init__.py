"""TRL's asynchronous GRPO with episodes that are played here: a worker, a weight transfer, sessions for TRL's worker.

Experimental, like that trainer: it may change in a minor version.
"""

from tokengrove.trl.adapters import AdapterTransfer, publish_adapter, save_adapter
from tokengrove.trl.sessions import AgentSession, SessionFactory
from tokengrove.trl.weights import WeightTransfer
from tokengrove.trl.without_gpu import train_without_gpu
from tokengrove.trl.worker import AgentWorker

__all__ = [
    "AdapterTransfer",
    "AgentSession",
    "AgentWorker",
    "SessionFactory",
    "WeightTransfer",
    "publish_adapter",
    "save_adapter",
    "train_without_gpu",
]
