"""Engines sample tokens behind one protocol, `interface.Engine`.

Turns send requests through `gate.Gate`; trainers pause it and change weights through `admin.EngineAdmin`.

`create` creates the engine that the settings name: `transformers/`, `sglang/`, `servers/` (remote SGLang and vLLM
servers), `scripted/` or `mailbox`. `contract` is the test suite for third-party engines.
"""
