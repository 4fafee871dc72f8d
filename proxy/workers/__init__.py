"""Several processes (workers) that serve one port as one server: their shared state and their communication.

Sessions, rewards and claims are shared through the database, as between servers. This package has the rest: which
worker runs an attempt (`attempt_table`), calls between workers (`peers`), and the administration of the engine by
worker 0, the leader (`leader`).
"""
