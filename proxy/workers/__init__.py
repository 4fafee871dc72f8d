"""Several processes (workers) that serve one port as one server: what they share, and how they talk to each other.

Sessions, rewards and claims are shared through the database, as between servers. Here is the rest: who runs a turn
(`attempt_table`), calls from worker to worker (`peers`), and the engine's administration by worker 0, which leads
(`leader`).
"""
