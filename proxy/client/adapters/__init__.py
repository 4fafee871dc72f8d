"""Samples as trainers take them, one module a trainer: `verl`, `roll`, `areal`, `trl`, `huggingface`.

Each is a function of the samples of an export; only what is asked for in a library's own types needs that library.
"""
