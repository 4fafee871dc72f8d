"""Sessions for `tests.bench.affinity`: drawn from a stated distribution, or recorded from the conformance clients.

`affinity_traces.json` has the prompt and output tokens of each turn, as the proxy counted them for the clients of
`tests/golden/clients`. `python -m tests.bench.affinity_sessions` writes it again from these files.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.captures import FOLDER, Turn, read

TRACES = Path(__file__).with_name("affinity_traces.json")
GROUP = 8
MOST_TURNS, SIGMA = 1178, 1.2
CONTEXT, SUMMARY = 32_768, 2_000
"""A prompt that grows beyond `CONTEXT` tokens is cut to the shared prompt and a summary, as coding agents do."""


@dataclass(frozen=True, slots=True)
class Step:
    """A turn. Its prompt begins with the prompt and output of the turn before if both are in the same `part`.

    `tool_s`: seconds since the end of the turn before.
    """

    prompt: int
    output: int
    tool_s: float
    part: int = 0


@dataclass(frozen=True, slots=True)
class Session:
    """The first `shared` tokens of each prompt are those of the whole `group`."""

    name: str
    group: str
    shared: int
    steps: Sequence[Step]


def turns_formula(mean: float) -> str:
    return f"turns = min({MOST_TURNS}, ceil(exp(N({_mu(mean):.3f}, {SIGMA}))))"


def drawn(rng: random.Random, groups: int, mean: float, one_prompt: int = 0) -> list[Session]:
    """Sessions with a mean number of turns of `mean`, in groups that begin together and share 2,000 to 6,000 tokens.

    `one_prompt`: all are one group that shares so many tokens, unless it is 0.
    """
    found = []
    for group in range(groups):
        shared = one_prompt or rng.randrange(2_000, 6_001)
        name = "0" if one_prompt else str(group)
        for number in range(GROUP):
            turns = min(MOST_TURNS, math.ceil(rng.lognormvariate(_mu(mean), SIGMA)))
            found.append(Session(f"{group}.{number}", name, shared, list(_steps(rng, turns, shared))))
    return found


def recorded(rng: random.Random, groups: int) -> list[Session]:
    """Groups of 8 equal recordings, in random order, with drawn times of tools. All but the tools' times are recorded.

    The clients follow a plan at once, so recorded times of tools would mean nothing. The first prompt is shared.
    """
    traces = list(json.loads(TRACES.read_text()).values())
    found = []
    for group in range(groups):
        trace = rng.choice(traces)
        for number in range(GROUP):
            steps, part = [], 0
            for index, (prompt, output) in enumerate(trace):
                part += index > 0 and prompt < sum(trace[index - 1])
                steps.append(Step(prompt, output, _tool_s(rng) if index else 0.0, part))
            found.append(Session(f"{group}.{number}", str(group), min(step.prompt for step in steps), steps))
    return found


def _steps(rng: random.Random, turns: int, shared: int) -> Iterator[Step]:
    prompt, part = shared, 0
    for turn in range(turns):
        output = math.ceil(rng.lognormvariate(math.log(110), 0.8))
        yield Step(prompt, output, _tool_s(rng) if turn else 0.0, part)
        prompt += output + math.ceil(rng.lognormvariate(math.log(200), 0.9))
        if prompt > CONTEXT:
            prompt, part = shared + SUMMARY, part + 1


def _tool_s(rng: random.Random) -> float:
    return rng.lognormvariate(0.0, 1.0)


@lru_cache
def _mu(mean: float) -> float:
    """The mu of the lognormal distribution whose truncated and rounded values have this mean."""
    low, high = 0.0, math.log(MOST_TURNS)
    normal = random.Random(0)
    sample = [normal.gauss(0.0, SIGMA) for _ in range(20_000)]
    for _ in range(20):
        mu = (low + high) / 2
        found = sum(min(MOST_TURNS, math.ceil(math.exp(mu + value))) for value in sample) / len(sample)
        low, high = (mu, high) if found < mean else (low, mu)
    return (low + high) / 2


def _usage(reply: Any) -> tuple[int, int]:
    """The largest counts of prompt and output tokens in a reply."""
    best = 0, 0
    if isinstance(reply, dict):
        for names in (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens")):
            counts = [reply.get(name) for name in names]
            if all(isinstance(value, int) for value in counts):
                best = counts[0] + (reply.get("cache_read_input_tokens") or 0), counts[1]
    inner = reply.values() if isinstance(reply, dict) else reply if isinstance(reply, list) else ()
    for prompt, output in map(_usage, inner):
        best = max(best[0], prompt), max(best[1], output)
    return best


def counts_of(turns: Sequence[Turn]) -> list[tuple[int, int]]:
    """The prompt and output tokens of each turn."""
    return [_usage(turn.reply) for turn in turns]


def record() -> None:
    """Write the traces: of each client the first recording in which every reply has counts."""
    found: dict[str, list[tuple[int, int]]] = {}
    for path in sorted(FOLDER.iterdir()):
        client, turns = read(path)
        counts = counts_of(turns)
        if len(counts) > 1 and all(prompt and output for prompt, output in counts):
            found.setdefault(client["client"], counts)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(counts)}" for name, counts in sorted(found.items()))
    TRACES.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    record()
