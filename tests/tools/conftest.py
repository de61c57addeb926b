"""What tests of `tools/checkpoint.py` share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.checkpoint import main

Command = Callable[..., str]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the tool in this process; returns what it prints, errors included."""

    def call(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        found = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert found == code, printed.out + printed.err
        return printed.out + printed.err

    return call
