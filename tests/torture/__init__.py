"""Runs the server's parts under an order of events that a seed chooses, and checks invariants on top.

`python -m tests.torture --help` says how to run it. `loop` chooses the order, `fibres` makes threads steps of it,
`seam` lists what is replaced and what stays real, and each module of `scenarios` has a few scenarios.
"""
