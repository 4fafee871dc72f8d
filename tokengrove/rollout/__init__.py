"""Plays episodes of agents against a server: sessions, agents, scorers, and the processes and sandboxes they run in.

Everything here talks HTTP through `tokengrove.client`, so an agent runs the same in training, evaluation and
production. The environment around an agent holds the control key of its session; the agent has only its own key.
"""
