"""Agents that play the agents of other systems in started sessions: AReaL, verl, ROLL, gem and OpenEnv.

`tokengrove.rollout.episodes.resolve_agent` imports the module that it needs, by name.
"""
