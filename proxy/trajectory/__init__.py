"""Trees of interactions: matching a request to its parent, and laying out trees as training samples.

Pure functions and data in memory: no I/O, no engine. Tokens are joined only after they were compared id by id.
"""
