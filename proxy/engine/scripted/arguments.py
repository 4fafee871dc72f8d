"""`--engine scripted`: the script and the engine that its `--engine-arg` values ask for."""

from __future__ import annotations

import math

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
    script = _script(playing, arguments, vocab_size, speech)
    engine = ScriptedEngine(script, vocab_size=vocab_size, context_length=context_length)
    engine.keep_requests = False
    return engine


def _script(playing: str, arguments: dict[str, str], vocab_size: int, speech: Speech | None) -> Script:
    delay_s = _seconds(arguments, "delay_s")
    if playing == "babble":
        tokens = _integer(arguments, "tokens", default=128, least=1)
        return babble(tokens, vocab_size, _integer(arguments, "chunk", default=tokens, least=1), delay_s)
    if speech is None:
        raise ConfigurationError("--engine-arg play=agent needs a renderer")
    think = bool(_integer(arguments, "think", default=0, least=0))
    return act(speech, think=think, chunk=_integer(arguments, "chunk", default=1, least=1), delay_s=delay_s)


def _integer(arguments: dict[str, str], key: str, *, default: int, least: int) -> int:
    text = arguments.get(key, str(default))
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(f"--engine-arg {key}={text}: the value must be an integer of at least {least}")
    return int(text)


def _seconds(arguments: dict[str, str], key: str) -> float:
    text = arguments.get(key, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(f"--engine-arg {key}={text}: the value must be a number of seconds, at least 0")
    return seconds
