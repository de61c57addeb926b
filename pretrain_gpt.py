"""Pre-trains a dense GPT: `python pretrain_gpt.py --config configs/demo.yaml`, or the same under torchrun."""

from __future__ import annotations

import sys

from megalite.config import check, load_config, save_config
from megalite.train.run import fail, pretrain, world_size


def main() -> None:
    """Configuration -> place on the axes -> model -> trainer."""
    try:
        config = load_config(sys.argv[1:], prog="pretrain_gpt.py")
        check(config, world_size())
    except ValueError as error:
        fail(f"pretrain_gpt.py: {error}")
    pretrain(config, lambda path: save_config(config, path))


if __name__ == "__main__":
    main()
