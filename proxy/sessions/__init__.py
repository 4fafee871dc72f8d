"""Live sessions: their start and end, keys and access, rewards, and what other replicas committed to them.

A session in memory equals its rows in the store. Which caller reaches which session is decided in `access` alone.
"""
