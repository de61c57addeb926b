"""Bytes that a transformer layer sends over tp, counted, against the formulas of the papers."""

from __future__ import annotations

import torch

from megalite.batch import MicroBatch
from megalite.models.llama import Llama
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.config import ModelConfig
from megalite.parallel.data import DataParallel
from megalite.parallel.random import initialize
from megalite.testing.world import World

S, B, H, V = 16, 2, 32, 40
WIDTH = 8  # bytes of a float64


def _batch() -> MicroBatch:
    ids = torch.randint(V, (S, B), generator=torch.Generator().manual_seed(0))
    return MicroBatch(
        tokens=ids, labels=ids, loss_mask=torch.ones(S, B), positions=torch.arange(S)[:, None].expand(S, B),
        samples=torch.arange(B), step=0,
    )  # fmt: skip


def _bytes_of_a_layer(mpu: ParallelState, recompute: str, stash: bool = False) -> int:
    """What a model of three layers sends over tp in a forward and a backward, less what one of two layers sends."""
    sent = []
    for num_layers in (2, 3):
        config = ModelConfig(num_layers=num_layers, hidden_size=H, num_heads=4, ffn_hidden_size=48, vocab_size=V)
        model = Llama(config, mpu, recompute=recompute, recompute_stash=stash).double()
        initialize(model, seed=1)
        mpu.reset_stats()
        model(None, _batch()).backward()
        sent.append(mpu.tp.stats.bytes_sent)
    return sent[1] - sent[0]


def test_tensor_parallel_sends_four_all_reduces_a_layer(world: World) -> None:
    for tp in (2, 4):
        ring = 2 * (tp - 1) * S * B * H * WIDTH // tp
        for sent in world.run(_bytes_of_a_layer, "none", layout=ParallelConfig(tp=tp), ranks=tp):
            assert sent == 4 * ring


def test_sequence_parallel_gathers_the_saved_input_again_in_backward(world: World) -> None:
    for tp in (2, 4):
        part = (tp - 1) * S * B * H * WIDTH // tp
        layout = ParallelConfig(tp=tp, sequence_parallel=True)
        for sent in world.run(_bytes_of_a_layer, "none", layout=layout, ranks=tp):
            assert sent == (4 + 4 + 2) * part, "4 all-gathers, 4 reduce-scatters, and 2 gathers for weight gradients"


def test_full_recompute_adds_the_forward_communication_once(world: World) -> None:
    ring = 2 * (2 - 1) * S * B * H * WIDTH // 2
    for sent in world.run(_bytes_of_a_layer, "full", layout=ParallelConfig(tp=2), ranks=2):
        assert 5 * ring <= sent <= 6 * ring, "the last all-reduce of a layer is not needed again"


def test_a_stash_of_results_spares_the_recompute_its_sums(world: World) -> None:
    ring = 2 * (2 - 1) * S * B * H * WIDTH // 2
    for sent in world.run(_bytes_of_a_layer, "full", True, layout=ParallelConfig(tp=2), ranks=2):
        assert sent == 4 * ring, "all-reduces of a layer: 2 forward, 2 backward"
    layout = ParallelConfig(tp=2, sequence_parallel=True)
    for sent in world.run(_bytes_of_a_layer, "full", True, layout=layout, ranks=2):
        assert sent == (4 + 4 + 2 + 2) * ring // 2, "the gathers, whose results are too large to keep, come again"


def _exchanges(mpu: ParallelState, recompute: str, stash: bool) -> int:
    """All-to-alls over ep of a model of experts, forward and backward."""
    config = ModelConfig(
        num_layers=2, hidden_size=H, num_heads=4, ffn_hidden_size=48, vocab_size=V, num_experts=4, top_k=2
    )
    model = Llama(config, mpu, recompute=recompute, recompute_stash=stash).double()
    initialize(model, seed=1)
    mpu.reset_stats()
    model(None, _batch()).backward()
    sites = mpu.ep.stats.by_site
    return sum(entry.calls for site, entry in sites.items() if site.endswith("all_to_all"))


def test_a_stash_spares_the_recompute_its_exchanges_of_tokens(world: World) -> None:
    def count(recompute: str, stash: bool) -> list[int]:
        return world.run(_exchanges, recompute, stash, layout=ParallelConfig(ep=2), ranks=2)

    plain = count("none", False)
    assert count("full", True) == count("selective:mlp", True) == plain
    assert count("full", False) > plain


def _gradient_bytes(mpu: ParallelState) -> tuple[int, int]:
    config = ModelConfig(num_layers=2, hidden_size=H, num_heads=4, ffn_hidden_size=48, vocab_size=V)
    model = Llama(config, mpu).double()
    initialize(model, seed=1)
    reducer = DataParallel(model.units(), mpu, queue=model.queue)
    mpu.reset_stats()
    reducer.zero_grad()
    reducer.arm()
    model(None, _batch()).backward()
    reducer.finish()
    return mpu.dp_cp.stats.bytes_sent, sum(segment.main_grad.nbytes for segment in reducer.segments)


def test_data_parallel_sends_one_ring_all_reduce_of_the_gradients(world: World) -> None:
    for sent, gradients in world.run(_gradient_bytes, layout=ParallelConfig(), ranks=4):
        assert sent == 2 * 3 * gradients // 4
