"""Sandboxes on this machine keep the contract, and so does a remote one whose provider is a folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.sandbox_contract import SandboxContract
from tests.unit.tokengrove.rollout.folder_sandbox import PARENT, FolderSandbox
from tokengrove.rollout.sandboxes import LocalProcessSandbox, Sandbox


class TestLocalProcessSandbox(SandboxContract):
    @pytest.fixture
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        sandbox = LocalProcessSandbox({})
        await sandbox.start()
        yield sandbox
        await sandbox.stop()


class TestRemoteSandbox(SandboxContract):
    @pytest.fixture
    async def sandbox(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sandbox]:
        monkeypatch.setenv(PARENT, str(tmp_path / "sandboxes"))
        sandbox = FolderSandbox({"max_concurrent": 2})
        await sandbox.start()
        yield sandbox
        await sandbox.stop()
        assert not any((tmp_path / "sandboxes").iterdir())
