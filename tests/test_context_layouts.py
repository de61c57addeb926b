"""The promise for long context: a sequence cut over ranks, in every mode and beside every other axis, is one rank's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megalite.config import Config
from megalite.data.rows import SampleSource
from megalite.data.sampler import PackedDocuments, RaggedMasks
from megalite.layout import parse_layout
from megalite.testing.layouts import prove_layouts
from megalite.testing.world import World
from tests.tiny import config_for

MODES = ("ring", "all_gather", "ulysses", "ulysses_ring")
# Every mode, every kind of row and every other axis; the rest of the table is in FULL.
COVER = [
    ("llama", "odd", "cp2"),
    ("llama", "packed-odd", "cp4:ulysses_ring"),
    ("llama", "window-packed", "cp4:ring,from:2=all_gather+pp2"),
    ("llama", "packed-odd", "cp2:ulysses+tp2+sp"),
    ("llama", "odd", "cp2:all_gather+pp2:zb_v"),
    ("tied-llama", "packed", "cp2+pp2+dp2+mbs1"),
    ("moe-bias", "odd", "cp2:ring+tp2+sp+ep2+recompute:full"),
    ("moe-capacity", "packed-odd", "cp2+etp2+tp2"),
    ("lfm2-moe", "packed-odd", "cp4:ring+ep2"),
]
FULL = [
    ("gpt2", "packed-odd", "cp2:all_gather+recompute:full"),
    ("lfm2", "packed", "cp2+pp2:zb_v+recompute:full"),
    ("llama", "packed", "cp4:all_gather"),
    ("llama", "causal", "cp4:ulysses"),
    ("moe", "packed-odd", "cp4+ep4+mbs1"),
    ("llama", "sinks-packed", "cp2:ulysses+tp2"),
    ("moe-choice", "packed-odd", "cp4:all_gather"),
    ("llama", "window-packed", "cp8"),
    *[("llama", "odd", f"cp2:{mode}") for mode in MODES],
    *[("llama", "packed", f"cp4:{mode}") for mode in MODES],
    *[("llama", "causal", f"cp8:{mode}") for mode in MODES],
    ("llama", "packed", "cp8:ulysses_ring4"),
    ("gpt2", "odd", "cp4:ring"),
    ("gpt2", "packed", "cp4:ulysses"),
    ("tied-llama", "packed", "cp4:ulysses_ring+mbs4"),
    *[("llama", "window-odd", f"cp4:{mode}") for mode in MODES],
    ("llama", "window-packed-odd", "cp4:ring,every:2=ulysses_ring,0=all_gather+recompute:full"),
    ("gpt2", "odd", "cp2:all_gather,but_every:2=ulysses+tp2+sp"),
    ("lfm2", "packed", "cp4:ulysses_ring,2,3=ring"),
    *[("llama", "sinks-packed", f"cp2:{mode}+tp2") for mode in MODES],
    ("llama", "odd", "cp2+tp2+sp"),
    ("llama", "causal", "cp2+tp4"),
    ("llama", "packed", "cp2+pp2"),
    ("tied-llama", "packed", "cp2+pp2:zb_v"),
    ("llama", "packed", "cp2+dp2+mbs1"),
    ("llama", "packed", "cp2+recompute:full"),
    ("gpt2", "packed", "cp2+tp2+pp2+mbs1+recompute:full"),
    ("moe", "packed", "cp2+ep2"),
    ("moe", "odd", "cp2:ulysses+etp2+tp2"),
    ("moe-bias", "packed", "cp2+ep2+dp2"),
    ("moe-capacity", "odd", "cp4"),
    ("moe-capacity", "packed-odd", "cp2+tp2+sp+ep2"),
    ("moe-exact", "packed-odd", "cp2+ep2"),
    ("moe-choice", "odd", "cp2+tp2+sp"),
    ("moe-sinkhorn", "packed-odd", "cp2+ep2"),
    ("moe-micro-batch", "packed", "cp2:ulysses"),
    ("lfm2", "odd", "cp2:ring"),
    ("lfm2", "packed", "cp4:all_gather+mbs1"),
    ("lfm2", "packed-odd", "cp2:ulysses+tp2+sp"),
]
ROWS = [*COVER, *(pytest.param(*row, marks=pytest.mark.full) for row in FULL)]


def documents(data: SampleSource, seed: int) -> SampleSource:
    """Ragged masks over rows of documents of odd lengths."""
    return RaggedMasks(PackedDocuments(data, seed, (1, 2, 3, 7, 13, 21)), seed)


def config_of(model: str, rows: str, tokens: str, cache: Path) -> Config:
    """A tiny config whose rows are of 32 tokens, or of 29."""
    config = config_for(model, tokens, cache, global_batch_size=8)
    if "window" in rows:  # in some layers
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, window=7, window_layers="from:2"))
    if "sinks" in rows:
        variants = dataclasses.replace(config.model, attention_sinks=True, attention_softcap=1.5)
        config = dataclasses.replace(config, model=variants)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=29 if "odd" in rows else 32))


@pytest.mark.parametrize(("model", "rows", "layout"), ROWS, ids=["-".join(row) for row in (*COVER, *FULL)])
def test_layout_is_a_deployment_detail(
    model: str, rows: str, layout: str, tokens: str, references: Path, world: World
) -> None:
    (difference,) = prove_layouts(
        config_of(model, rows, tokens, references),
        [parse_layout(layout)],
        world,
        references,
        timeout=120.0,
        wrap_data=documents if "packed" in rows else RaggedMasks,
    )
    assert difference.passed, difference.first_diff
    assert max(difference.loss, difference.grads, difference.grad_norm, difference.weights) < 1e-9
