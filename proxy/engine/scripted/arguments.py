"""`--engine scripted`: the script and the engine that its `--engine-arg` values ask for."""

from __future__ import annotations

from proxy.engine.arguments import check_known
from proxy.engine.scripted.acting import Speech, act
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Script, babble
from proxy.errors import ConfigurationError


def from_arguments(
    arguments: dict[str, str], vocab_size: int, context_length: int, speech: Speech | None = None
) -> ScriptedEngine:
    """Create the engine of `serve --engine scripted` from its `--engine-arg` values. Raises ConfigurationError.

    play=babble (default): `tokens` per output (128), `chunk` tokens at once (all). play=agent (see `acting`): `chunk`
    (1), `think` (0). Both: `delay_s`, seconds before each chunk (0).
    """
    playing = arguments.get("play", "babble")
    own = {"babble": {"tokens"}, "agent": {"think"}}.get(playing)
    if own is None:
        raise ConfigurationError(f"--engine-arg play={playing}: play must be babble or agent")
    check_known(arguments, {"play", "chunk", "delay_s", *own}, f"the scripted engine with play={playing}")
    try:
        script = _script(playing, arguments, vocab_size, speech)
    except ValueError as error:
        raise ConfigurationError(f"--engine-arg: {error}") from None
    engine = ScriptedEngine(script, vocab_size=vocab_size, context_length=context_length)
    engine.keep_requests = False
    return engine


def _script(playing: str, arguments: dict[str, str], vocab_size: int, speech: Speech | None) -> Script:
    """Raises ValueError for a value that is no number or out of range."""
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
