"""What tests of `tools/` share."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from tools.checkpoint import main

Command = Callable[..., str]
Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `tools/checkpoint.py` in this process; returns what it prints, errors included."""

    def call(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        found = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert found == code, printed.out + printed.err
        return printed.out + printed.err

    return call


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    """Runs `tools/NAME.py` in this process, as a shell would: `script(name, *arguments, code=0, columns=100)`."""

    def call(name: str, *arguments: object, code: int = 0, columns: int = 100) -> subprocess.CompletedProcess[str]:
        words = [f"{name}.py", *map(str, arguments)]
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", words)
        capsys.readouterr()
        found = _ended(importlib.import_module(f"tools.{name}").main)
        printed = capsys.readouterr()
        assert found == code, printed.out + printed.err
        return subprocess.CompletedProcess(words, found, printed.out, printed.err)

    return call


def _ended(run: Callable[[], object]) -> int:
    """The exit status of a script, whose message goes to standard error."""
    try:
        return int(run() or 0)  # pyright: ignore[reportArgumentType]
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
