"""A mixture of experts in the place of a feed-forward block."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megalite.kernels.chosen import Kernels
from megalite.kernels.saved import Saved, beside, chain, size_of, wide
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.nn.experts import Experts
from megalite.nn.mlp import ParallelMLP
from megalite.nn.router import Router, tokens_are_cut
from megalite.nn.saved import BatchShape
from megalite.parallel.collectives import gather_from, scatter_to
from megalite.parallel.expert import Dispatcher
from megalite.parallel.random import normal_
from megalite.parallel.saved import dispatch_saved
from megalite.parallel.shard import Shard, ShardedModule, set_shard
from megalite.parallel.tensor import init_unless_meta


class MoELayer(nn.Module):
    """The weighted sum of each token's experts, and of a shared one: [s, b, h] -> ([s, b, h], None).

    Takes the place of `ParallelMLP`, cut in the same way ([s / tp, b, h] under sequence parallelism). Inside, every
    tensor-parallel rank has its own part of the tokens (the duplicate-token drop of DeepSpeed-TED, Singh et al., 2023,
    arXiv:2303.06318). Class attributes choose the router, the experts and the shared expert.
    """

    router_cls: type[Router] = Router
    experts_cls: type[Experts] = Experts
    shared_cls: type[ParallelMLP] = ParallelMLP

    def __init__(self, config: ModelConfig, mpu: ParallelState, layer: int, kernels: Kernels | None = None):
        super().__init__()
        self.mpu, self.tp = mpu, mpu.tp
        sequence_parallel = mpu.config.sequence_parallel and mpu.tp.size > 1
        self.cuts_here = tokens_are_cut(mpu) and not sequence_parallel and mpu.tp.size > 1
        self.router = self.router_cls(config, mpu, layer, mpu.tp if tokens_are_cut(mpu) else None, kernels)
        self.experts = self.experts_cls(config, mpu, kernels)
        self.dispatcher = Dispatcher(config.num_experts, mpu, kernels)
        self.shared = self.shared_gate = None
        if config.shared_ffn_hidden_size:
            self.shared = self.shared_cls(replace(config, ffn_hidden_size=config.shared_ffn_hidden_size), mpu, kernels)
        if config.shared_expert_gate:
            self.shared_gate = SharedExpertGate(config, mpu)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Returns the output; there is no bias left to add."""
        tokens = scatter_to(x, self.tp, 0) if self.cuts_here else x
        assignment, loss = self.router(tokens, context)
        # The tokens travel while the shared expert computes.
        travelling = self.dispatcher.send(tokens.flatten(0, 1), assignment)
        shared = self._shared(x, context)
        arrived = travelling.wait()
        y = self.dispatcher.combine(self.experts(arrived.tokens, arrived.probs, arrived.counts), arrived)
        y = y.view(tokens.shape)
        if loss is not None:
            y = loss.attach(y)
        if self.cuts_here:
            y = gather_from(y, self.tp, 0, x.shape[0])
        return (y if shared is None else y + shared), None

    def saved(self, shape: BatchShape) -> Saved:
        """What the router, the way to the experts, these and the shared expert keep, with even loads."""
        pairs, dispatcher = self.router.pairs(shape), self.dispatcher
        sources = dispatcher.ep.size * (dispatcher.etp.size if dispatcher.cut else 1)
        share = self.experts.fc1.shape[0] / dispatcher.num_experts
        arriving = round(pairs * sources * share * shape.expert_load)
        row = size_of((shape.width,), shape.dtype)
        tokens = shape.tokens // (self.tp.size if tokens_are_cut(self.mpu) else 1)
        routed = beside(
            self.router.saved(shape),
            chain(
                dispatch_saved(
                    dispatcher,
                    tokens,
                    pairs,
                    arriving,
                    row,
                    wide(shape.dtype).itemsize,
                    padded=self.router.config.pad_to_capacity,
                ),
                self.experts.saved(arriving, shape.dtype),
            ),
        )
        if self.cuts_here:
            routed = replace(routed, input=0, own=routed.own + routed.input)
        return beside(routed, self._shared_saved(shape))

    def _shared_saved(self, shape: BatchShape) -> Saved:
        if self.shared is None:
            return Saved()
        block = self.shared.saved(shape)
        if self.shared_gate is None:
            return block
        product = Saved(own=shape.stream + size_of((shape.rows,), shape.dtype))  # both of its factors
        return beside(chain(block, product), Saved(input=shape.stream))

    def _shared(self, x: Tensor, context: Context) -> Tensor | None:
        if self.shared is None:
            return None
        y, bias = self.shared(x, context)
        y = y if bias is None else y + bias
        return y if self.shared_gate is None else y * self.shared_gate(x)


class SharedExpertGate(ShardedModule):
    """sigmoid(x w) for x [s, b, h]: how much of the shared expert each token takes (Qwen2-MoE)."""

    def __init__(self, config: ModelConfig, mpu: ParallelState):
        super().__init__()
        self.init_std = config.init_std
        partial = (mpu.tp,) if mpu.config.sequence_parallel and mpu.tp.size > 1 else ()
        self.weight = set_shard(
            nn.Parameter(torch.empty(1, config.hidden_size)), Shard("weight", (1, config.hidden_size), partial=partial)
        )
        init_unless_meta(self)

    def init_parameters(self, seed: int) -> None:
        """N(0, init_std^2)."""
        normal_(self.weight, seed, self.init_std)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, 1]."""
        return nn.functional.linear(x, self.weight).sigmoid()
