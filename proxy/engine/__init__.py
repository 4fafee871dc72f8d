"""Engines: what generates tokens behind one protocol, `interface.Engine`, in front of which `gate.Gate` stands.

`create` makes the engine of the settings: `transformers/`, `sglang/`, `servers/` (remote SGLang and vLLM servers),
`scripted/` or `mailbox`. `contract` is the test suite for an engine of your own.
"""
