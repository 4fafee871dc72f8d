"""Tokengrove: a proxy that serves agents' model calls and records their exact tokens as trees for RL trainers.

`ARCHITECTURE.md` beside this file says which package does what. Packages import from the layers below them only.
"""

__version__ = "0.1.0"
