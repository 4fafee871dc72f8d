"""Engines sample tokens behind one protocol, `interface.Engine`.

Turns send requests through `gate.Gate`; trainers pause it and change weights through `admin.EngineAdmin`.

`create` makes the engine of the settings: `transformers/`, `sglang/`, `servers/` (remote SGLang and vLLM servers),
`scripted/` or `mailbox`. `contract` is the test suite for an engine of your own.
"""
