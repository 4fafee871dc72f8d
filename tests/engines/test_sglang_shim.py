"""What stands in for SGLang's kernels leaves torch as it is for the forward passes that SGLang is compared with."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

# In a process of its own: torch must not have been asked for a device before.
MADE_AFTER_ADAPTERS = """
import sglang.srt.lora.lora_manager, torch
with torch.device("meta"):
    print({torch.empty(1).device.type, torch.zeros(1).device.type, torch.tensor([1]).device.type})
"""


def test_a_device_context_holds_also_where_memory_is_not_pinned() -> None:
    pytest.importorskip("sglang", reason="sglang is not installed (tests/engines/requirements-sglang.txt)")
    made = subprocess.run([sys.executable, "-c", MADE_AFTER_ADAPTERS], capture_output=True, text=True, check=True)
    assert made.stdout.splitlines()[-1] == "{'meta'}"
