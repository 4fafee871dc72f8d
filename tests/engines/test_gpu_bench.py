"""The GPU benchmark without a GPU: it runs on the CPU from end to end, or says why it cannot."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.bench.clients import streamed_answer
from tests.bench.gpu import check_possible
from tests.bench.rollouts import Reply, first_token_ms, hit_rates, tokens_a_second

S = 1_000_000_000
REPLIES = [
    Reply(0, 0, 0, S // 10, 2 * S, 100, 0, 50),
    Reply(0, 1, 2 * S, 2 * S + S // 4, 4 * S, 200, 120, 50),
    Reply(1, 0, S, 0, 2 * S, 300, 7, 50),
    Reply(1, 1, 2 * S, 2 * S + S // 2, 5 * S, 400, 300, 50),
]


def test_rates_count_all_replies_and_cache_hits_and_waits_only_later_turns() -> None:
    assert tokens_a_second(REPLIES) == 200 / 5
    assert hit_rates(REPLIES) == (420 / 600, 420 / 500)
    assert first_token_ms(REPLIES, 0.0) == 250 and first_token_ms(REPLIES, 0.99) == 500
    assert first_token_ms(REPLIES[:1], 0.5) is None


def test_a_stream_is_read_however_it_is_cut() -> None:
    head = '{"choices":[{"delta":'
    events = [
        head + '{"role":"assistant","content":""}}],"usage":null}',
        head + '{"reasoning_content":"hm"}}],"usage":null}',
        head + '{"content":"a\\n\\nb"}}],"usage":null}',
        '{"choices":[],"usage":{"completion_tokens":3}}',
    ]
    body = "".join(f"data: {event}\n\n" for event in events) + "data: [DONE]\n\n"
    expected = {"role": "assistant", "content": "a\n\nb", "reasoning_content": "hm"}
    for size in (1, 7, 1000):
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        chunked = "".join(f"{len(part):x}\r\n{part}\r\n" for part in parts) + "0\r\n\r\n"
        assert streamed_answer(chunked.encode()) == (expected, {"completion_tokens": 3})


def test_a_missing_gpu_or_package_is_reported() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(SystemExit, match="no CUDA GPU is here"):
        check_possible("transformers", "cuda")
    with pytest.raises(SystemExit, match="needs the package no_such_engine"):
        check_possible("no_such_engine", "cpu")


@pytest.mark.engines
def test_it_runs_on_the_cpu_from_end_to_end() -> None:
    pytest.importorskip("llguidance", reason="the transformers engine is not installed")
    sizes = ["--sessions", "4", "--turns", "3", "--rounds", "1", "--reply-tokens", "16", "--first-characters", "300"]
    command = ["-m", "tests.bench.gpu", "--engine", "transformers", "--device", "cpu", "--model-size", "tiny", *sizes]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "4 sessions at once, 3 turns each" in done.stdout
    rows = re.findall(
        r"(direct|proxy) +│ +(\d+) +│ +(\S+) +│ +(\S+) +│ +(\d+) +│ +(\d\.\d+) +│ +(\d\.\d+)", done.stdout
    )
    assert [row[0] for row in rows] == ["direct", "proxy"] * 2
    assert all(float(row[6]) > 0.8 for row in rows)  # the cache keeps whole pages of 32 tokens
    assert len(re.findall(r"proxy / direct = \d+\.\d+", done.stdout)) == 2
