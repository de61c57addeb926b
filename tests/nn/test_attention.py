"""Windows, soft-capping, sinks and documents: Hugging Face's own attention on one rank, and one rank on every cut."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, GptOssConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from megalite.batch import MicroBatch
from megalite.kernels.attention_kernel import AttentionKernel
from megalite.kernels.attention_mask import AttentionMask
from megalite.kernels.attention_rows import AttentionDropout
from megalite.kernels.chosen import Kernels
from megalite.kernels.config import KernelConfig
from megalite.kernels.rope import rope_tables
from megalite.mpu import ParallelState
from megalite.nn.attention import BiasedAttention, ParallelAttention, QKNormAttention
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.parallel.random import initialize
from megalite.testing import World, check_parallel_module
from tests.hugging_face import assert_equal, fill, float64

S, B, H, HEADS, KV, D = 21, 2, 24, 4, 2, 8
CONFIG = ModelConfig(num_layers=4, hidden_size=H, num_heads=HEADS, num_kv_heads=KV, head_dim=D, init_std=0.5)
SIZES: dict[str, Any] = {
    "hidden_size": H, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D,
    "attn_implementation": "eager",
}  # fmt: skip
LAYOUTS = ["tp2", "tp2+sp", "tp4", "tp4+sp"]


def context(documents: Tensor | None = None, *, size: int = S, rope: bool = True, training: bool = True) -> Context:
    ids = torch.zeros(size, B, dtype=torch.int64)
    positions = torch.arange(size)[:, None].expand(size, B)
    batch = MicroBatch(
        tokens=ids, labels=ids, loss_mask=torch.ones(size, B), positions=positions, samples=torch.arange(B), step=0,
        documents=documents,
    )  # fmt: skip
    tables = rope_tables(positions, D, 10000.0, torch.float64) if rope else None
    return Context.uncut(batch, rope=tables, training=training)


def packed(size: int = S) -> Tensor:
    """Documents that begin in other places in each row."""
    documents = torch.zeros(size, B, dtype=torch.int64)
    documents[9:, 0] = 9
    documents[10:, 0] = 10
    documents[4:, 1] = 4
    return documents


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(
    cls: type[ParallelAttention], config: ModelConfig, mpu: ParallelState, *, layer: int = 0, backend: Any = "auto"
) -> ParallelAttention:
    return cls(config, mpu, layer, Kernels(config=KernelConfig(attention=backend)))


def single(cls: type[ParallelAttention], config: ModelConfig, **options: Any) -> ParallelAttention:
    module = build(cls, config, ParallelState.single(), **options).double()
    initialize(module, seed=3)
    fill(module, seed=5, std=0.5)
    return module


def call(module: nn.Module, x: Tensor, documents: Tensor | None = None, size: int = S) -> Tensor:
    y, bias = module(x, context(documents, size=size if documents is None else len(documents)))
    return y if bias is None else y + bias


def causal_mask(window: int) -> Tensor:
    """What Hugging Face adds to scores: [1, 1, s, s]."""
    i, j = torch.arange(S)[:, None], torch.arange(S)
    seen = (j <= i) & (j > i - window) if window else j <= i
    return torch.zeros(1, 1, S, S, dtype=torch.float64).masked_fill(~seen, -math.inf)


def theirs_called(name: str, theirs: Mapping[str, Tensor]) -> Tensor:
    names = {"proj.weight": "o_proj.weight", "proj.bias": "o_proj.bias", "sinks.weight": "sinks"}
    return theirs[
        names.get(name, name.replace("qkv.q.", "q_proj.").replace("qkv.k.", "k_proj.").replace("qkv.v.", "v_proj."))
    ]


def assert_same(ours: ParallelAttention, theirs: nn.Module, mask: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Equal weights give equal outputs and gradients, of all weights too."""
    fill(theirs, std=0.5)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(theirs_called(name, dict(theirs.named_parameters())))
    data, dy = values(2, S, B, H)
    x, x_theirs = data.clone().requires_grad_(), data.transpose(0, 1).contiguous().requires_grad_()
    with float64():
        wanted, _ = theirs(x_theirs, position_embeddings=(cos, sin), attention_mask=mask)
        wanted.backward(dy.transpose(0, 1))
    y = call(ours, x)
    y.backward(dy)
    assert x.grad is not None
    assert_equal(y, wanted.transpose(0, 1), "output")
    assert_equal(x.grad.transpose(0, 1), x_theirs.grad, "gradient of the input")
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    for name, parameter in ours.named_parameters():
        assert_equal(parameter.grad, theirs_called(name, grads), name)
    assert len(grads) == len(list(ours.parameters()))


@pytest.mark.parametrize("layer", [0, 1])
def test_gpt_oss(layer: int) -> None:
    """Sinks, biases, and a window in the layers 0, 2, ..."""
    with float64():
        theirs = GptOssAttention(GptOssConfig(**SIZES, num_hidden_layers=4, sliding_window=6), layer).double()
    config = dataclasses.replace(CONFIG, window=6, window_layers="but_every:2", attention_sinks=True)
    assert config.window_of(layer) == (theirs.sliding_window or 0)
    cos, sin = (table.transpose(0, 1) for table in context().rope or ())
    ours = single(BiasedAttention, config, layer=layer)
    assert_same(ours, theirs, causal_mask(config.window_of(layer)), cos, sin)


@pytest.mark.parametrize("layer", [0, 1])
def test_gemma_2(layer: int) -> None:
    """Soft-capping, a scale of its own, and a window in the layers 0, 2, ..."""
    with float64():
        theirs = Gemma2Attention(
            Gemma2Config(
                **SIZES, num_hidden_layers=4, sliding_window=6, query_pre_attn_scalar=12, attn_logit_softcapping=2.0,
            ),
            layer,
        ).double()  # fmt: skip
    config = dataclasses.replace(
        CONFIG, window=6, window_layers="but_every:2", attention_softcap=2.0, attention_scale=12**-0.5
    )
    assert config.window_of(layer) == (theirs.sliding_window or 0)
    cos, sin = (torch.cat((table, table), -1).transpose(0, 1) for table in context().rope or ())
    assert_same(single(ParallelAttention, config, layer=layer), theirs, causal_mask(config.window_of(layer)), cos, sin)


EVERYTHING = dataclasses.replace(CONFIG, window=7, attention_sinks=True, attention_softcap=3.0)
KINDS: dict[str, tuple[type[ParallelAttention], ModelConfig]] = {
    "plain": (ParallelAttention, CONFIG),
    "window": (QKNormAttention, dataclasses.replace(CONFIG, window=7)),
    "sinks": (BiasedAttention, dataclasses.replace(CONFIG, attention_sinks=True)),
    "everything": (BiasedAttention, EVERYTHING),
}


@pytest.mark.parametrize(("kind", "documents"), [*((kind, True) for kind in KINDS), ("plain", False)])
def test_one_rank_is_every_cut(kind: str, documents: bool, world: World) -> None:
    """Outputs and gradients, and that each element of a gradient is owned, so counted in the norm, once."""
    run = partial(call, documents=packed(24)) if documents else partial(call, size=24)
    check_parallel_module(
        partial(build, *KINDS[kind]), inputs=[values(24, B, H)], layouts=LAYOUTS, call=run, world=world
    )


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_rows_of_their_own(kind: str) -> None:
    """A packed row attends as its documents do alone: the same outputs and gradients."""
    module = single(*KINDS[kind])
    documents = packed()
    x, dy = values(2, S, B, H)
    together = x.clone().requires_grad_()
    call(module, together, documents).backward(dy)
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    for row in range(B):
        starts = documents[:, row].unique().tolist()
        for start, stop in zip(starts, [*starts[1:], S], strict=True):
            alone = x[start:stop, row : row + 1].expand(-1, B, -1).clone().requires_grad_()
            # Rotary scores know only distances, so that a document may count its positions from 0.
            y = call(module, alone, torch.zeros(stop - start, B, dtype=torch.int64))
            y[:, :1].backward(dy[start:stop, row : row + 1])
            assert alone.grad is not None and together.grad is not None
            assert_equal(together.grad[start:stop, row], alone.grad[:, 0], "gradient of the input")
    for name, parameter in module.named_parameters():
        assert_equal(grads[name], parameter.grad, name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_documents_do_not_leak(kind: str, backend: str) -> None:
    """A token of the first document changes no bit of the others."""
    if backend == "sdpa" and KINDS[kind][1].window:
        with pytest.raises(ValueError, match="has no sliding window"):
            single(*KINDS[kind], backend=backend)
        return
    module, results = single(*KINDS[kind], backend=backend), []
    x, dy = values(2, S, B, H)
    for change in (0.0, 1.0):
        changed = x.clone()
        changed[3, 0] += change
        changed.requires_grad_()
        y = call(module, changed, packed())
        grad = torch.autograd.grad(y, changed, dy)[0]
        results.append((y.detach(), grad))
    for before, after in zip(*results, strict=True):
        assert not before[:9, 0].equal(after[:9, 0])
        assert before[9:, 0].equal(after[9:, 0]) and before[:, 1].equal(after[:, 1])


def test_one_document_is_causal_attention() -> None:
    """Documents, a window and blocks that do nothing change no result, with dropout or without."""
    x = values(S, B, H)
    for dropout in (0.0, 0.2):
        config = dataclasses.replace(CONFIG, attention_dropout=dropout)
        module = single(QKNormAttention, config)
        plain = call(module, x)
        assert_equal(call(module, x, torch.zeros(S, B, dtype=torch.int64)), plain, "documents")
        for window in (S, 100):
            wide = single(QKNormAttention, dataclasses.replace(config, window=window))
            assert_equal(call(wide, x), plain, "window")
        narrow = single(QKNormAttention, dataclasses.replace(config, window=6))
        assert_equal(call(narrow, x), call(narrow, x, torch.zeros(S, B, dtype=torch.int64)), "narrow window")
        assert not torch.allclose(call(narrow, x), plain)


class OwnKernel(AttentionKernel):
    """Attention with scores that fall with distance (ALiBi, Press et al., 2022, arXiv:2108.12409): one method."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: AttentionDropout | None
    ) -> tuple[Tensor, Tensor]:
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, 2) for x in (k, v))
        query, start, key = (x.t()[:, None] for x in (mask.query, mask.start, mask.key))
        query, start, key = query[..., None], start[..., None], key[:, :, None]
        scores = torch.einsum("ibhd,jbhd->bhij", q, k) / q.shape[-1] ** 0.5 - 0.1 * (query - key)
        scores = scores.masked_fill((key < start) | (key > query), -math.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        probs = (scores - lse.masked_fill(lse == -math.inf, 0.0)).exp()
        return torch.einsum("bhij,jbhd->ibhd", probs, v), lse.squeeze(-1).permute(2, 0, 1)


class OwnAttention(ParallelAttention):
    """Attention of one's own."""

    def kernel(self, like: Tensor, dropout: float) -> AttentionKernel:
        return OwnKernel()


@pytest.mark.parametrize("documents", [None, packed()], ids=["whole", "packed"])
@pytest.mark.parametrize("sinks", [False, True])
def test_own_attention_is_one_method(documents: Tensor | None, sinks: bool) -> None:
    config = dataclasses.replace(CONFIG, attention_sinks=sinks)
    module = single(OwnAttention, config)
    x = values(S, B, H)
    weights = [x, *(p.detach().clone() for p in module.parameters())]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        names = [name for name, _ in module.named_parameters()]
        own = dict(zip(names, parameters, strict=True))
        qkv = x @ torch.cat([own[f"qkv.{part}.weight"] for part in "qkv"]).t()
        q, k, v = (part.unflatten(-1, (-1, D)) for part in qkv.split([HEADS * D, KV * D, KV * D], -1))
        start = torch.zeros(S, B, dtype=torch.int64) if documents is None else documents
        places = torch.arange(S)[:, None].expand(S, B)
        out, lse = OwnKernel().forward(q, k, v, AttentionMask(query=places, start=start, key=places), None)
        if sinks:
            out = out * torch.sigmoid(lse - own["sinks.weight"])[..., None]
        return out.flatten(2) @ own["proj.weight"].t()

    leaves = [w.requires_grad_() for w in weights]
    wanted = run(*leaves)
    ours_x = x.detach().clone().requires_grad_()
    y, _ = module(ours_x, context(documents, rope=False))
    assert_equal(y, wanted, "output")
    dy = values(S, B, H, seed=2)
    wanted.backward(dy)
    y.backward(dy)
    for ours, theirs in zip((ours_x, *module.parameters()), leaves, strict=True):
        assert_equal(ours.grad, theirs.grad, "gradient")


def test_a_mask_is_planned_once_for_all_layers() -> None:
    shared = context(packed())
    assert shared.mask(3) is shared.mask(3)
    assert shared.mask(3) is not shared.mask(0)


def test_a_backend_that_cannot_is_refused_when_the_layer_is_built() -> None:
    for changes, problem in (
        ({"attention_softcap": 2.0}, "has no soft-capping"),
        ({"window": 4}, "has no sliding window"),
        ({"attention_dropout": 0.1}, "has no layout-invariant dropout"),
    ):
        with pytest.raises(ValueError, match=problem):
            single(ParallelAttention, dataclasses.replace(CONFIG, **changes), backend="sdpa")
    single(ParallelAttention, dataclasses.replace(CONFIG, window=4, window_layers="1"), backend="sdpa", layer=0)
