"""Adapters from samples to the input types of trainers: `verl`, `roll`, `areal`, `trl`, `skyrl`, `slime`, `miles`,
`prime_rl`, `verifiers`, `nemo_rl`, `art`, `huggingface`.

Each is a function of the samples of an export. A library is needed only where its own types are returned.
"""
