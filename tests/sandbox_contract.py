"""What every sandbox does with files, processes, time limits and its end.

It needs no package of the server, so it also runs where only a provider's SDK is installed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tokengrove.rollout.sandboxes import Sandbox


async def until(condition: str, sandbox: Sandbox) -> None:
    """Wait until a command in the sandbox succeeds. Raises AssertionError after many attempts."""
    for _ in range(600):
        if (await sandbox.run(condition)).exit_code == 0:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{condition} did not succeed")


class SandboxContract:
    """Its subclasses have the fixture `sandbox`, which has been started and is stopped after the test."""

    async def test_commands_run_in_the_working_folder_with_their_variables(self, sandbox: Sandbox) -> None:
        told = await sandbox.run('pwd; echo "$TREE"; echo "$LEAF"', {"TREE": "a 'quoted' \"oak\"\n$HOME"})
        assert (told.exit_code, told.timed_out) == (0, False)
        assert told.output == f"{sandbox.working_folder}\na 'quoted' \"oak\"\n$HOME\n\n"

    async def test_words_reach_the_program_unchanged(self, sandbox: Sandbox) -> None:
        words = ["it's", '"two" words', "$HOME", "", "a\nline", "\\n", "*", "ünï"]
        told = await sandbox.run(["/bin/sh", "-c", 'for each in "$@"; do printf "[%s]" "$each"; done', "sh", *words])
        assert told.output == "".join(f"[{word}]" for word in words)

    async def test_exit_codes_and_both_outputs_are_told(self, sandbox: Sandbox) -> None:
        told = await sandbox.run("echo oak; echo elm >&2; exit 3")
        assert (told.exit_code, told.output) == (3, "oak\nelm\n")

    async def test_a_program_that_does_not_exist_is_told(self, sandbox: Sandbox) -> None:
        try:
            told = await sandbox.run(["no-such-program-of-a-sandbox"])
        except OSError:
            return
        assert told.exit_code == 127
        assert "no-such-program-of-a-sandbox" in told.output

    async def test_files_of_any_bytes_are_written_with_their_folders_and_read(self, sandbox: Sandbox) -> None:
        content = bytes(range(256)) * 1000
        await sandbox.upload("new folder/it's.bin", content)
        assert await sandbox.download("new folder/it's.bin") == content
        assert await sandbox.download(f"{sandbox.working_folder}/new folder/it's.bin") == content
        assert (await sandbox.run('wc -c <"new folder/it\'s.bin"')).output.strip() == str(len(content))
        await sandbox.upload("new folder/it's.bin", b"")
        assert await sandbox.download("new folder/it's.bin") == b""

    async def test_what_is_no_file_is_not_read(self, sandbox: Sandbox) -> None:
        await sandbox.run("mkdir folder; mkfifo pipe")
        for path in ("missing", "folder", "pipe"):
            with pytest.raises(FileNotFoundError):
                await sandbox.download(path)

    async def test_a_command_gets_its_whole_input(self, sandbox: Sandbox) -> None:
        given = bytes(range(256)) * 500
        process = await sandbox.launch("cat >given; echo read", stdin=given)
        assert (await process.wait()).output == "read\n"
        assert await sandbox.download("given") == given
        assert (await sandbox.run("cat")).output == ""

    async def test_the_end_of_a_long_output_is_told_and_all_of_it_kept(self, sandbox: Sandbox, tmp_path: Path) -> None:
        kept = tmp_path / "kept"
        kept.write_text("before\n")
        process = await sandbox.launch("i=0; while [ $i -lt 100000 ]; do echo $i; i=$((i+1)); done", output=kept)
        told = await process.wait()
        whole = "".join(f"{number}\n" for number in range(100000))
        assert kept.read_text() == f"before\n{whole}"
        assert told.output == whole[-256 * 1024 :]

    async def test_a_command_that_exceeds_its_limit_is_killed_with_what_it_started(self, sandbox: Sandbox) -> None:
        script = "echo begun; sleep 1000 & echo $! >child; echo $$ >own; wait"
        told = await sandbox.run(script, timeout_s=1.5)
        assert (told.timed_out, told.output) == (True, "begun\n")
        await until("! kill -0 $(cat own) 2>/dev/null && ! kill -0 $(cat child) 2>/dev/null", sandbox)

    async def test_a_killed_command_ends(self, sandbox: Sandbox) -> None:
        process = await sandbox.launch("echo $$ >own; exec sleep 1000")
        await until("test -s own", sandbox)
        assert not process.ended
        process.kill()
        told = await process.wait()
        assert told.exit_code == -9
        assert process.ended

    async def test_a_command_ends_while_what_it_left_runs_on_until_all_are_killed(self, sandbox: Sandbox) -> None:
        told = await sandbox.run("setsid sleep 1000 >/dev/null 2>&1 & echo $! >left; echo done")
        assert (told.exit_code, told.output) == (0, "done\n")
        assert (await sandbox.run("kill -0 $(cat left)")).exit_code == 0
        await sandbox.kill_all()
        await until("! kill -0 $(cat left) 2>/dev/null", sandbox)
        assert (await sandbox.run("cat left")).output.strip().isdigit()

    async def test_several_commands_run_at_once(self, sandbox: Sandbox) -> None:
        first = await sandbox.launch("while [ ! -e go ]; do sleep 0.05; done; echo went")
        await sandbox.run("touch go")
        assert (await first.wait()).output == "went\n"

    async def test_it_can_be_stopped_twice(self, sandbox: Sandbox) -> None:
        process = await sandbox.launch("exec sleep 1000")
        await sandbox.stop()
        await sandbox.stop()
        del process
