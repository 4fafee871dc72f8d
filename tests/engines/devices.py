"""SGLang's arguments for tests and benchmarks on each device."""

from __future__ import annotations

import os

# Small enough for two cores; without max_total_tokens the scheduler's cache would take all memory.
CPU_DEVICE = (*("device=cpu", "attention_backend=torch_native", "sampling_backend=pytorch", "disable_cuda_graph=true"),)
# On a GPU, SGLang chooses for itself; a part of the memory stays free for another engine.
CUDA_ARGUMENTS = (
    *("dtype=bfloat16", "mem_fraction_static=0.4", "context_length=2048"),
    *("enable_memory_saver=true", "enable_weights_cpu_backup=true"),
    # For an installation that lacks a kernel which SGLang would choose, for example attention_backend=triton.
    *os.environ.get("TOKENGROVE_TEST_SGLANG_ARGUMENTS", "").split(),
)
CPU_ARGUMENTS = (
    *CPU_DEVICE,
    "dtype=float32",
    "max_total_tokens=16384",
    "context_length=2048",
    "max_running_requests=64",
)
