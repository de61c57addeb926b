"""What a pretrain script does: configuration -> place on the axes -> model -> trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable

from megalite.config.check import check
from megalite.config.load import load_config, save_config
from megalite.config.sections import Config
from megalite.train.run import fail, pretrain, world_size


def run_script(prog: str, refuse: Callable[[Config], str | None] = lambda config: None) -> None:
    """Pre-trains what the command line describes; `refuse` may say why this script is not the one for it."""
    try:
        config = load_config(sys.argv[1:], prog=prog)
        if (reason := refuse(config)) is not None:
            raise ValueError(reason)
        check(config, world_size())
    except ValueError as error:
        fail(f"{prog}: {error}")
    pretrain(config, lambda path: save_config(config, path))
