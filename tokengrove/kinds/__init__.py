"""What plays the agents of other systems in sessions that have been started: AReaL's, verl's, ROLL's and gem's.

`tokengrove.rollout.episodes.resolve_agent` imports the one that it needs, by name.
"""
