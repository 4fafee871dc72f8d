"""What agents print does not get among what a command has to say on standard output."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import subprocess
from tokengrove.commands.agents_output import agents_on_stderr
print("before")
with agents_on_stderr():
    print("agent")
    subprocess.run(["echo", "child"], check=True)
print("after")
"""


def test_what_is_printed_meanwhile_goes_to_stderr_and_so_does_that_of_children() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert run.stdout == "before\nafter\n"
    assert run.stderr.splitlines() in (["agent", "child"], ["child", "agent"])


def test_an_agent_may_close_what_it_prints_to() -> None:
    program = PROGRAM.replace('print("agent")', 'import sys; print("agent"); sys.stdout.close()')
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "before\nafter\n"
    assert run.stderr.splitlines() in (["agent", "child"], ["child", "agent"])


def test_a_closed_output_is_left_closed() -> None:
    run = subprocess.run(
        ["bash", "-c", 'exec "$0" -c "$1" >&-', sys.executable, PROGRAM.replace("check=True", "check=False")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "OSError" not in run.stderr
