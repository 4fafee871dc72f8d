"""The script and the engine that the `--engine-arg` values of `--engine scripted` select."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.engine.arguments import check_known, seconds
from proxy.engine.scripted.acting import Speech, act
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Script, babble
from tokengrove.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ScriptedOptions:
    """The `--engine-arg` values of `serve --engine scripted`.

    `play`: babble or agent (see `acting`). `tokens`: tokens per output, for babble. `think`: reason first, for agent.
    `chunk`: tokens per chunk. `delay_s`: seconds before each chunk.
    """

    play: str
    tokens: int
    think: bool
    chunk: int
    delay_s: float

    def engine(self, vocab_size: int, context_length: int, speech: Speech | None) -> ScriptedEngine:
        """Create the engine. `speech` is the renderer, for an agent. Raises ConfigurationError without one."""
        engine = ScriptedEngine(self._script(vocab_size, speech), vocab_size=vocab_size, context_length=context_length)
        engine.keep_requests = False
        return engine

    def _script(self, vocab_size: int, speech: Speech | None) -> Script:
        if self.play == "babble":
            return babble(self.tokens, vocab_size, self.chunk, self.delay_s)
        if speech is None:
            raise ConfigurationError("--engine-arg play=agent needs a renderer")
        return act(speech, think=self.think, chunk=self.chunk, delay_s=self.delay_s)


def parse_options(arguments: Mapping[str, str]) -> ScriptedOptions:
    """Parse the `--engine-arg` values of the scripted engine. Raises ConfigurationError naming the wrong value."""
    playing = arguments.get("play", "babble")
    own = {"babble": {"tokens"}, "agent": {"think"}}.get(playing)
    if own is None:
        raise ConfigurationError(f"--engine-arg play={playing}: play must be babble or agent")
    check_known(arguments, {"play", "chunk", "delay_s", *own}, f"the scripted engine with play={playing}")
    tokens = _integer(arguments, "tokens", default=128, least=1)
    return ScriptedOptions(
        play=playing,
        tokens=tokens,
        think=bool(_integer(arguments, "think", default=0, least=0)),
        chunk=_integer(arguments, "chunk", default=tokens if playing == "babble" else 1, least=1),
        delay_s=seconds("delay_s", arguments.get("delay_s", "0")),
    )


def _integer(arguments: Mapping[str, str], key: str, *, default: int, least: int) -> int:
    text = arguments.get(key, str(default))
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(f"--engine-arg {key}={text}: the value must be an integer of at least {least}")
    return int(text)
