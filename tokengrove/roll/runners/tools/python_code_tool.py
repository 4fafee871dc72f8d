"""A tool that runs the Python code in an agent's text, in its own process and for a limited time."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.sandboxes.cleaning import MARK, kill_marked

PATTERNS = (r"<code>(.*?)</code>", r"```\n?python(.*?)```")
INSTRUCTION = (
    "You may run Python code while you solve the problem. Write a complete script, with its imports, in "
    "<code>...</code>, and print what you want to see. Your text ends with the code; the next message has the output, "
    'behind "Code execution result: ". Then go on, or give the final answer.'
)

_MOST = 20_000
"""The maximum number of characters of an output in an observation."""
_FILE_BYTES = 64 * 2**20
"""The largest file that a program may write, including its output."""
_VARIABLES = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "SYSTEMROOT")
_SET = {"OPENBLAS_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
_PROGRAM = (
    f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({_FILE_BYTES}, {_FILE_BYTES})); "
    "sys.argv[:] = ['program.py']; runpy.run_path('program.py', run_name='__main__')"
)
_BWRAP = ("--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/work")
_READ = ("/usr", "/lib", "/lib64", "/bin", "/etc")


class PythonCodeTool:
    """Runs the first complete piece of code in a text; its output is the observation.

    The program gets `timeout` seconds, a new folder, few environment variables and no input. It is killed with all
    processes that it started (on Linux; elsewhere with its process group). Output beyond 20000 characters is cut in the
    middle. `sandbox_type` "none" runs it with the rights of this process; "bwrap" runs it in bubblewrap, without
    network and with a read-only system.

    `patterns`: regular expressions whose first group is the code. `tool_instruction`: the instruction for the model.
    `keep_error_last_line`: show only the last line of an error. A call fails if the program does, or prints nothing.
    """

    tool_type = "python_code"

    def __init__(
        self,
        timeout: float = 5,
        sandbox_type: Literal["none", "bwrap"] = "none",
        keep_error_last_line: bool = False,
        tool_instruction: str | None = None,
        patterns: Sequence[str] | None = None,
    ) -> None:
        if sandbox_type not in ("none", "bwrap"):
            raise InvalidRequest(f"sandbox_type must be none or bwrap, not {sandbox_type!r}", param="sandbox_type")
        if sandbox_type == "bwrap" and shutil.which("bwrap") is None:
            raise InvalidRequest("sandbox_type bwrap needs bubblewrap, and there is no bwrap on PATH")
        self.timeout, self.sandbox_type, self.keep_error_last_line = timeout, sandbox_type, keep_error_last_line
        self.tool_instruction = tool_instruction or INSTRUCTION
        self.patterns = list(patterns or PATTERNS)

    def instruction_string(self) -> str:
        return self.tool_instruction

    def execute_action(self, action: str) -> tuple[bool, bool, str, str]:
        """Return whether there is code, whether it failed, its output, and the text up to the end of the code."""
        found = [match for pattern in self.patterns if (match := re.search(pattern, action, re.DOTALL))]
        if not found:
            return False, True, "", action
        first = min(found, key=lambda match: match.end())
        succeeded, output = self._run(first.group(1).strip())
        output = output.lstrip(" \n")
        return True, not succeeded or not output, f"Code execution result: {output}\n", action[: first.end()]

    def _run(self, code: str) -> tuple[bool, str]:
        """Whether a program ended with exit code 0, and its output followed by its errors."""
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            Path(folder, "program.py").write_text(code, encoding="utf-8", errors="backslashreplace")
            ended = self._ended(folder, out, err)
            errors = _text(err).strip()
            if errors and self.keep_error_last_line:
                errors = errors.rpartition("\n")[2]
            if ended is None:
                errors = f"{errors}\nThe program was stopped: its time of {self.timeout:g} seconds was over.".lstrip()
            output = _text(out)
        return ended == 0, _shortened(f"{output}\n{errors}" if errors else output)

    def _ended(self, folder: str, out: IO[bytes], err: IO[bytes]) -> int | None:
        """The exit code of the program in `folder`; None after its time limit."""
        mark = f"{os.environ.get(MARK, '')}{uuid.uuid4().hex}."  # begins with the mark of this process, if it has one
        process = subprocess.Popen(
            self._command(folder),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ} | _SET | {MARK: mark},
            start_new_session=True,
        )
        try:
            return process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError, PermissionError):  # all of its processes have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kill_marked(mark)

    def _command(self, folder: str) -> list[str]:
        program = [sys.executable, "-c", _PROGRAM]
        if self.sandbox_type == "none":
            return program
        bound = [
            argument for path in (*_READ, sys.prefix, sys.base_prefix) for argument in ("--ro-bind-try", path, path)
        ]
        return ["bwrap", *_BWRAP, *bound, "--bind", folder, "/work", "--chdir", "/work", *program]


def _text(file: IO[bytes]) -> str:
    """The beginning and the end of a file, longer than what is shown."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    begin = file.read(4 * _MOST)
    file.seek(max(file.tell(), size - 4 * _MOST))
    return (begin + file.read()).decode(errors="replace")


def _shortened(text: str) -> str:
    half = _MOST // 2
    return text if len(text) <= _MOST else f"{text[:half]} [... the middle is left out ...] {text[-half:]}"
