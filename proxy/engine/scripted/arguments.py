"""`--engine scripted`: the script and the engine that its `--engine-arg` values ask for."""

from __future__ import annotations

from proxy.engine.scripted.acting import Speech, act
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Script, babble
from proxy.errors import ConfigurationError


def from_arguments(
    arguments: dict[str, str], vocab_size: int, context_length: int, speech: Speech | None = None
) -> ScriptedEngine:
    """The engine of `serve --engine scripted`, as `--engine-arg` says.

    play=babble (the default): `tokens` (128), `chunk` (all at once). play=agent: `chunk` (1), `think` (0), see
    `acting`. Both: `delay_s` a chunk (0).
    """
    playing = arguments.get("play", "babble")
    own = {"babble": {"tokens"}, "agent": {"think"}}.get(playing)
    if own is None:
        raise ConfigurationError(f"--engine-arg play={playing} is not one of babble, agent")
    if unknown := set(arguments) - {"play", "chunk", "delay_s", *own}:
        known = ", ".join(sorted({"play", "chunk", "delay_s", *own}))
        raise ConfigurationError(f"--engine-arg {min(unknown)} is unknown; play={playing} has {known}")
    try:
        script = _script(playing, arguments, vocab_size, speech)
    except ValueError as error:
        raise ConfigurationError(f"--engine-arg: {error}") from None
    engine = ScriptedEngine(script, vocab_size=vocab_size, context_length=context_length)
    engine.keep_requests = False
    return engine


def _script(playing: str, arguments: dict[str, str], vocab_size: int, speech: Speech | None) -> Script:
    """Raises ValueError for a number that is none or out of range."""
    tokens = int(arguments.get("tokens", "128"))
    chunk = int(arguments.get("chunk", str(tokens) if playing == "babble" else "1"))
    delay_s = float(arguments.get("delay_s", "0"))
    if tokens < 1 or chunk < 1 or delay_s < 0:
        raise ValueError("tokens and chunk must be at least 1, delay_s at least 0")
    if playing == "babble":
        return babble(tokens, vocab_size, chunk, delay_s)
    if speech is None:
        raise ConfigurationError("--engine-arg play=agent needs a renderer")
    return act(speech, think=bool(int(arguments.get("think", "0"))), chunk=chunk, delay_s=delay_s)
