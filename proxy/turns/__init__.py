"""One turn from its request to its commit, the same for all APIs. `turns.Turns` is the entry point; `turns` lists the
steps.

A reader sees the end of a turn only after its commit, and only a committed turn can be continued.
"""
