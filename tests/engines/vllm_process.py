"""Real vLLM servers on the CPU, run by the Python of their own environment (`TOKENGROVE_TEST_VLLM_PYTHON`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import httpx

from proxy.engine.tiny.model import build_tiny_model, write_json
from tests.support import free_port

START_TIMEOUT_S = 300.0
VARIABLE = "TOKENGROVE_TEST_VLLM_PYTHON"
_ENVIRONMENT = {
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    **{"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"},
}
_ARGUMENTS = (
    *("--host", "127.0.0.1", "--max-model-len", "4096", "--dtype", "float32", "--enforce-eager"),
    *("--max-num-seqs", "32", "--max-logprobs", "20"),
)
FULL = ("--enable-scale-out", "--enable-prompt-tokens-details")
_HEAD = 32
"""The smallest head dimension of vLLM's attention on a CPU."""


class VllmProcess:
    """A vLLM server process on a local port. `flags`: more arguments. `dev_mode`: with the endpoints for control."""

    def __init__(self, folder: Path, log: Path, *flags: str, dev_mode: bool = True, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [os.environ[VARIABLE], "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        environment = {**os.environ, **_ENVIRONMENT} | ({"VLLM_SERVER_DEV_MODE": "1"} if dev_mode else {})
        environment.pop("PYTHONPATH", None)
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port), *_ARGUMENTS, *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=2.0, trust_env=False).status_code == 200:
                    return
            time.sleep(0.5)
        raise AssertionError(f"the server on {self.port} did not start; its log is {self._log.name}")

    def kill(self) -> None:
        """Kill the process group, and so the engine core too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def build_wide_model(folder: Path, seed: int) -> None:
    """Build the tiny model with heads that vLLM's CPU kernels have, and with logits that differ."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    build_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text()) | {"head_dim": _HEAD, "initializer_range": 0.2}
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**config)).save_pretrained(folder)
    write_json(folder / "config.json", config)
