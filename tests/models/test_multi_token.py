"""Multi-token prediction: against loops over tokens in plain torch, and the same on every layout."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.batch import BatchTotals, MicroBatch
from megalite.config import Config, ConfigError, check
from megalite.data.rows import SampleSource
from megalite.data.sampler import PackedDocuments, RaggedMasks
from megalite.grid import ParallelConfig
from megalite.layout import parse_layout
from megalite.models import MODELS
from megalite.models.transformer import Transformer
from megalite.mpu import ParallelState
from megalite.nn.multi_token import MultiTokenLayer, context_ahead, count_ahead, depths_saved, rows_ahead
from megalite.parallel.random import initialize
from megalite.pipeline.schedule import make_plan
from megalite.testing.layouts import prove_layouts
from megalite.testing.memory import LiveMemory
from megalite.testing.world import World
from megalite.train import flops
from megalite.train.build import build_training
from megalite.train.checkpoints import RunCheckpoints
from megalite.train.stages import parameter_counts, stage_layers
from megalite.train.step import evaluate, train_step
from tests.tiny import MTP, MTP_GPT2, MTP_MOE, config_for

CPU, SINGLE = torch.device("cpu"), ParallelState.single()
S, B = 11, 2


def _batch(*, documents: bool) -> MicroBatch:
    """Rows of documents of 5 tokens, some without attention between them; one ends in padding; ragged masks."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(MTP.vocab_size, (S + 1, B), generator=generator)
    places = torch.arange(S)[:, None].expand(S, B).contiguous()
    mask = (torch.rand(S, B, generator=generator) < 0.8).float()
    real = places < torch.tensor([S, S - 3])
    mask[~real] = 0.0
    if documents:
        mask[4::5] = 0.0
    return MicroBatch(
        tokens=text[:-1], labels=text[1:], loss_mask=mask, positions=places, samples=torch.arange(B), step=0,
        token_mask=real, documents=places // 5 * 5 if documents else None,
    )  # fmt: skip


def _with_totals(batch: MicroBatch, num_depths: int) -> MicroBatch:
    """As if the batch were all of the global one."""
    num_tokens = batch.tokens.numel() if batch.token_mask is None else int(batch.token_mask.sum())
    ahead = [(int(a), int(b)) for a, b in count_ahead([batch], num_depths).tolist()]
    totals = BatchTotals(num_rows=B, num_tokens=num_tokens, ahead=ahead,
                         num_labels=int(batch.loss_mask.count_nonzero()))  # fmt: skip
    return replace(batch, totals=totals)


# ---- plain torch, one row and one token at a time


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + MTP.norm_eps).sqrt() * weight


def _turned(x: Tensor, place: int) -> Tensor:
    """Rotary positions of one token's heads [heads, dim]."""
    half = x.shape[-1] // 2
    angle = place * MTP.rope_theta ** -(torch.arange(half, dtype=x.dtype) / half)
    a, b = x[:, :half], x[:, half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def _layer(w: dict[str, Tensor], name: str, x: list[Tensor], starts: list[int]) -> list[Tensor]:
    """A Llama layer over one row; token i sees starts[i] .. i."""
    heads, group = MTP.num_heads, MTP.num_heads // MTP.kv_heads
    normed = [_norm(token, w[f"{name}.attention_norm.weight"]) for token in x]
    q, k, v = (
        [(w[f"{name}.attention.qkv.{part}.weight"] @ token).view(-1, MTP.head_size) for token in normed]
        for part in "qkv"
    )
    out = []
    for i, token in enumerate(x):
        seen = range(starts[i], i + 1)
        mixed = []
        for head in range(heads):
            query = _turned(q[i], i)[head]
            scores = torch.stack([query @ _turned(k[j], j)[head // group] for j in seen]) / math.sqrt(MTP.head_size)
            mixed.append(sum(p * v[j][head // group] for p, j in zip(scores.softmax(0), seen, strict=True)))
        token = token + w[f"{name}.attention.proj.weight"] @ torch.cat([torch.as_tensor(m) for m in mixed])
        inner = _norm(token, w[f"{name}.mlp_norm.weight"])
        gate, up = (w[f"{name}.mlp.fc1.{part}.weight"] @ inner for part in ("gate", "up"))
        out.append(token + w[f"{name}.mlp.fc2.weight"] @ (F.silu(gate) * up))
    return out


def _token_loss(w: dict[str, Tensor], hidden: Tensor, label: int) -> Tensor:
    logits = w["head.weight"] @ hidden
    return logits.logsumexp(0) - logits[label] + MTP.z_loss * logits.logsumexp(0).square()


def _plain(w: dict[str, Tensor], batch: MicroBatch, num_layers: int, num_depths: int) -> list[list[Tensor]]:
    """The losses of all labels that count, by depth; depth 0 is the next token."""
    losses: list[list[Tensor]] = [[] for _ in range(1 + num_depths)]
    for row in range(B):
        tokens, labels = batch.tokens[:, row].tolist(), batch.labels[:, row].tolist()
        counts = batch.loss_mask[:, row].tolist()
        starts = batch.documents[:, row].tolist() if batch.documents is not None else [0] * S
        x = [w["embedding.weight"][token] for token in tokens]
        for layer in range(num_layers):
            x = _layer(w, f"layers.{layer}", x, starts)
        for i in range(S):
            if counts[i]:
                losses[0].append(_token_loss(w, _norm(x[i], w["final_norm.weight"]), labels[i]))
        for depth in range(1, 1 + num_depths):
            name = f"mtp.{depth - 1}"
            entering = []
            for i in range(S):
                further = tokens[i + depth] if i + depth < S else 0
                embedded = _norm(w["embedding.weight"][further], w[f"{name}.embedding_norm.weight"])
                both = torch.cat((embedded, _norm(x[i], w[f"{name}.hidden_norm.weight"])))
                entering.append(w[f"{name}.projection.weight"] @ both)
            x = _layer(w, f"{name}.layer", entering, starts)
            for i in range(S - depth):
                if counts[i + depth] and starts[i] == starts[i + depth]:
                    hidden = _norm(x[i], w[f"{name}.final_norm.weight"])
                    losses[depth].append(_token_loss(w, hidden, labels[i + depth]))
    return losses


@pytest.mark.parametrize("documents", [False, True])
def test_losses_and_gradients_are_those_of_loops_over_tokens(documents: bool) -> None:
    model = replace(MTP, num_layers=1, hidden_dropout=0.0)
    stage = MODELS["llama"](model, SINGLE).double()
    initialize(stage, seed=4)
    batch = _with_totals(_batch(documents=documents), model.mtp_layers)
    w = {name: p.detach().clone().requires_grad_() for name, p in stage.named_parameters()}
    losses = _plain(w, batch, model.num_layers, model.mtp_layers)
    assert [len(of_depth) for of_depth in losses[1:]] == [count for count, _ in batch.totals.ahead]
    main, *further = (torch.stack(of_depth).mean() for of_depth in losses)
    (main + model.mtp_loss_factor / model.mtp_layers * torch.stack(further).sum()).backward()

    loss = stage(None, batch)
    loss.backward(torch.tensor(1.0 / len(losses[0]), dtype=torch.float64))
    assert float(loss.detach() / len(losses[0])) == pytest.approx(float(main), rel=1e-13), "the next token's is shown"
    means = [float(total) / len(of_depth) for total, of_depth in zip(stage.losses_ahead[0], losses[1:], strict=True)]
    assert means == pytest.approx([float(mean) for mean in further], rel=1e-13)
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(parameter.grad, w[name].grad, rtol=1e-10, atol=1e-13, msg=name)


def test_a_label_of_another_document_or_row_does_not_count() -> None:
    batch = replace(_batch(documents=True), token_mask=None, loss_mask=torch.ones(S, B))
    ahead = rows_ahead(batch, 2)
    assert ahead.loss_mask[:, 0].tolist() == [1, 1, 1, 0, 0] * 2 + [0]
    assert ahead.token_mask is not None and (ahead.token_mask == (ahead.loss_mask > 0)).all()
    assert (ahead.labels[:-2] == batch.labels[2:]).all() and (ahead.tokens[:-2] == batch.tokens[2:]).all()
    without = replace(batch, documents=None)
    assert rows_ahead(without, 2).loss_mask.sum() == B * (S - 2)
    eod = replace(without, loss_mask=(batch.row_places % 5 != 4).float().expand(S, B))
    assert (rows_ahead(eod, 1).loss_mask[:-1] == eod.loss_mask[1:]).all(), "what is masked stays masked"
    assert rows_ahead(batch, S + 1).loss_mask.sum() == 0


# ---- layouts


def packed(dataset: SampleSource, seed: int) -> SampleSource:
    """Documents in the rows, under ragged masks."""
    return RaggedMasks(PackedDocuments(dataset, seed), seed)


COVER = [
    ("mtp", "tp2+sp+recompute:full"),
    ("mtp", "cp2+pp2:zb_v"),
    ("mtp", "dp2+zero3+mbs1"),
    ("mtp-gpt2", "pp2v2:interleaved+dp2+zero2"),
    ("mtp-moe", "ep2+pp2:dualpipe+mbs1"),
]
FULL = [
    ("mtp", "pp2:dualpipe+mbs1"), ("mtp-gpt2", "pp2:zb_v+tp2+sp"), ("mtp-moe", "ep2+tp2+sp+pp2:zb_h1"),
    ("mtp", "tp2"), ("mtp", "tp4+sp"), ("mtp", "pp2"), ("mtp", "pp4:gpipe"), ("mtp", "pp2:zb_v+dp2+zero1"),
    ("mtp", "pp2:zb_h1+dp2+zero3"), ("mtp", "dp2+zero3+recompute:full"), ("mtp", "cp2:ulysses+pp2"),
    ("mtp", "cp4:all_gather"), ("mtp", "cp2+tp2+sp+recompute:selective"), ("mtp", "dp2+pp2+zero2"),
    ("mtp-gpt2", "pp2:zb_v+dp2+zero3"), ("mtp-gpt2", "pp2:dualpipe+zero1"), ("mtp-gpt2", "tp2+dp2+zero3"),
    ("mtp", "cp2+pp2"), ("mtp-moe", "ep4+mbs1+zero3"), ("mtp-moe", "tp2+etp2+pp2+recompute:full"),
    ("mtp-moe", "cp2+ep2"),
]  # fmt: skip
ROWS = [*COVER, *(pytest.param(*row, marks=pytest.mark.full) for row in FULL)]


@pytest.mark.parametrize(("model", "layout"), ROWS, ids=[f"{m}-{lay}" for m, lay in (*COVER, *FULL)])
def test_layout_is_a_deployment_detail(model: str, layout: str, tokens: str, references: Path, world: World) -> None:
    """With documents in the rows of the dense model."""
    config = config_for(model, tokens, references, global_batch_size=8)
    (difference,) = prove_layouts(
        config, [parse_layout(layout)], world, references, timeout=120.0,
        wrap_data=RaggedMasks if model == "mtp-moe" else packed, num_steps=1,
    )  # fmt: skip
    assert difference.passed, difference.first_diff
    assert max(difference.loss, difference.grads, difference.grad_norm, difference.weights) < 1e-10


# ---- runs


def _run(mpu: ParallelState, config: Config, folder: str) -> tuple[tuple[float, ...], float, float]:
    """The losses of further tokens in a first step, the validation loss, and the loss of a step after loading."""
    training = build_training(config, mpu, CPU)
    checkpoints = RunCheckpoints(config, training, Path(folder))
    if checkpoints.load_start() is None:
        ahead = train_step(training, 0).losses_ahead
        checkpoints.save(1)
    else:
        ahead = ()
    return ahead, evaluate(training, 1), train_step(training, 1).loss


def test_checkpoints_fit_every_layout_and_a_model_without_on_demand(tokens: str, tmp_path: Path, world: World) -> None:
    config = config_for("mtp", tokens, tmp_path, precision="fp64", eval_every=1)
    config = replace(config, data=replace(config.data, split="50,50,0"), model=replace(config.model, hidden_dropout=0))
    ahead, validation, loss = world.run(_run, config, str(tmp_path / "one"), ranks=1)[0]
    assert len(ahead) == 2 and all(3 < of_depth < 9 for of_depth in ahead)
    again = replace(config, checkpoint=replace(config.checkpoint, load=str(tmp_path / "one")))
    layout = parse_layout("pp2+tp2+sp")
    for rank in world.run(_run, layout.apply(again), str(tmp_path / "two"), layout=layout.parallel, ranks=4):
        assert rank[1:] == pytest.approx((validation, loss), rel=1e-10)
    without = replace(again, model=replace(again.model, mtp_layers=0))
    with pytest.raises(Exception, match=r"holds .*mtp.0.* this model does not have"):
        world.run(_run, without, str(tmp_path / "three"), ranks=1)
    allowed = replace(without, checkpoint=replace(without.checkpoint, allow=("model.mtp_layers",)))
    assert world.run(_run, allowed, str(tmp_path / "three"), ranks=1)[0][1:] == pytest.approx((validation, loss))
    more = replace(allowed, model=replace(without.model, mtp_layers=3))
    assert world.run(_run, more, str(tmp_path / "four"), ranks=1)[0][1] == pytest.approx(validation, rel=1e-10)


# ---- estimates and rules


@pytest.mark.parametrize("model", [MTP, MTP_GPT2])
def test_layers_keep_what_they_declare(model: object) -> None:
    assert isinstance(model, type(MTP))
    for recompute in ("none", "full"):
        stage = MODELS[model.name](model, SINGLE, recompute=recompute)
        initialize(stage, seed=1)
        batch = _with_totals(replace(_batch(documents=False), token_mask=None), model.mtp_layers)
        kept, declared = _kept_ahead(stage, batch)
        assert kept == declared, recompute


def _kept_ahead(stage: Transformer, batch: MicroBatch) -> tuple[int, int]:
    """(bytes that multi-token layers and norms have made and keep, what they declare without the input)."""
    shape = stage.batch_shape(S, B, device=CPU)
    context = stage._context(batch)
    layers = [layer for layer in stage.mtp.values() if isinstance(layer, MultiTokenLayer)]
    contexts = [context_ahead(context, layer.depth) for layer in layers]
    x = torch.randn(S, B, shape.width, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert stage.final_norm is not None
    live, outputs = LiveMemory(), []
    layers[0](x, contexts[0])  # makes the masks that all share
    gc.collect()
    with live:
        hidden = x
        for layer, its_context in zip(layers, contexts, strict=True):
            hidden, output = layer(hidden, its_context)
            outputs.append(output)
        outputs.append(stage.final_norm(x))
        del hidden
    gc.collect()
    declared = depths_saved(layers, stage.final_norm, shape)
    return live.now - sum(output.untyped_storage().nbytes() for output in outputs), declared.total - declared.input


def test_flops_and_stages_count_the_further_layers() -> None:
    with torch.device("meta"):
        whole = MODELS["llama"](MTP, SINGLE)
    matrices = sum(p.numel() for name, p in whole.named_parameters() if p.dim() == 2 and name != "embedding.weight")
    head = MTP.hidden_size * MTP.vocab_size
    assert flops.matmul_parameters(MTP) == matrices + MTP.mtp_layers * head
    assert flops.attention_flops(MTP, {0: 7}) == 5 * flops.attention_flops(
        replace(MTP, num_layers=1, mtp_layers=0), {0: 7}
    )
    deep = replace(MTP, num_layers=8)
    plan = make_plan("1f1b", 2, 4, 1)
    for by in ("cost", "parameters"):
        first, last = stage_layers(deep, ParallelConfig(pp=2, partition=by), plan)
        assert len(first) > len(last) > 1, by
    counts = parameter_counts(MTP)
    assert counts.head - parameter_counts(MTP, ends_meet=True).head == MTP.vocab_size * MTP.hidden_size


@pytest.mark.parametrize(
    ("settings", "parallel", "message"),
    [
        ({"mtp_layers": -1}, {}, r"mtp_layers=-1 must be at least 1, or 0"),
        ({"mtp_layers": 32}, {}, r"mtp_layers=32 looks further ahead than rows of data.seq_len=32"),
        ({"mtp_loss_factor": 0.0}, {}, r"mtp_loss_factor=0.0 must be finite and above 0"),
        ({}, {"pp": 2, "post": True}, r"model.mtp_layers=2 ties weights of pipeline ranks \[0, 1\].* mtp_layers=0"),
    ],
)
def test_what_cannot_work_is_refused(
    settings: dict[str, int], parallel: dict[str, int], message: str, tokens: str, tmp_path: Path
) -> None:
    config = config_for("mtp", tokens, tmp_path)
    config = replace(
        config,
        model=replace(MTP, **settings),
        parallel=ParallelConfig(pp=parallel.get("pp", 1)),
        optim=replace(config.optim, post_validation="post" in parallel),
    )
    with pytest.raises(ConfigError, match=message):
        check(config, parallel.get("pp", 1))


def test_patterns_name_the_further_layers_too(tokens: str, tmp_path: Path) -> None:
    config = config_for("mtp-moe", tokens, tmp_path)
    check(replace(config, model=replace(MTP_MOE, moe_layers="1,3")), 1)
    with pytest.raises(ConfigError, match="no layer 4"):
        check(replace(config, model=replace(MTP_MOE, moe_layers="1,4")), 1)
