"""Runs agents against a server, as the users of other systems wrote them: a package for each system.

Everything here imports `tokengrove.client` only and talks HTTP, so an agent runs the same in training, evaluation and
production. The environment around an agent holds the control key of its session; the agent has only its own key.
"""
