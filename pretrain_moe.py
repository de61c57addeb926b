"""Pre-trains a mixture of experts: `python pretrain_moe.py --config configs/moe_demo.yaml`, or under torchrun."""

from __future__ import annotations

from megalite.config import Config
from megalite.config.script import run_script


def refuse(config: Config) -> str | None:
    """A dense model is the business of pretrain_gpt.py."""
    if config.model.num_experts:
        return None
    return "model.num_experts=0 makes a dense model; set model.num_experts, or use pretrain_gpt.py"


if __name__ == "__main__":
    run_script("pretrain_moe.py", refuse)
