"""The blocking client, which is the asyncio client without `await`: nobody writes it.

`PYTHONPATH=docker python -m supply.blocking_client` writes `tokengrove/client/blocking_client.py`, and with `--check`
fails if it differs. A comment `# blocking: CODE` in the asyncio client is code of the blocking one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).resolve().parents[2] / "tokengrove" / "client"
SOURCE, WRITTEN = CLIENT / "async_client.py", CLIENT / "blocking_client.py"
_FIRST_LINE = "# Written by `PYTHONPATH=docker python -m supply.blocking_client`: change async_client.py.\n"
_CHANGES = [
    (re.compile(pattern), text)
    for pattern, text in (
        (r"# blocking: ", ""),
        (r"await self\.hold\.ready\(\)", "self.hold.wait_ready()"),
        (r"await self\.clock\.wait\(", "self.clock.sleep("),
        (r"\bawait ", ""),
        (r"\basync (def|with|for)\b", r"\1"),
        (r"\b__a(enter|exit)__\b", r"__\1__"),
        (r"\ba(close|read|iter_bytes)\b", r"\1"),
        (r"\basync(contextmanager)\b", r"\1"),
        (r"\basync_(http_client)\b", r"\1"),
        (r"\bAsync(Client|Session|Transport|Iterator|Generator)\b", r"\1"),
        (r"\basyncio client\b", "blocking client"),
        (r"\bAsyncio client\b", "Blocking client"),
        (r"\bon the running event loop\b", "on an event loop in a thread of its own"),
    )
]


def blocking_client() -> str:
    """The text of the blocking client."""
    text = SOURCE.read_text(encoding="utf-8")
    for pattern, replacement in _CHANGES:
        text = pattern.sub(replacement, text)
    for command in (("check", "--fix-only", "--unsafe-fixes", "--select", "I,UP", "--quiet"), ("format", "--quiet")):
        words = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(WRITTEN), "-"]
        text = subprocess.run(words, input=text, capture_output=True, text=True, check=True, cwd=CLIENT).stdout
    return _FIRST_LINE + text


def main() -> int:
    """Write the client, or check it."""
    text = blocking_client()
    if sys.argv[1:] != ["--check"]:
        WRITTEN.write_text(text, encoding="utf-8")
    elif WRITTEN.read_text(encoding="utf-8") != text:
        print(f"{WRITTEN} is not what {SOURCE.name} makes: {__doc__}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
