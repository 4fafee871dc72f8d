"""Plays episodes of agents against a server: sessions, agents, scorers, processes and sandboxes.

This package talks HTTP through `tokengrove.client`, so an agent runs the same in training, evaluation and production.
The environment around an agent holds the control key of its session. The agent has only its own key.
"""
