"""Which parts of the model the ranks of a layout hold, before anything runs."""

from __future__ import annotations

import torch

from megalite.checkpoint.rewrite import Box
from megalite.mpu import ParallelState
from megalite.parallel.shard import buffer_tensors, shard_of
from megalite.train.build import build_stages, plan_of
from megalite.train.sections import Sections
from megalite.train.stages import stage_layers


def stored_boxes(config: Sections, num_ranks: int) -> list[dict[str, list[Box]]]:
    """For each rank, by global name, the rectangles of parameters and buffers that it would store.

    Those of the data-parallel ranks with the same ones are the first one's, undivided by ZeRO. Raises ValueError for a
    layout that the model does not fit.
    """
    micro_batches = 2 * config.parallel.pp * max(1, config.parallel.group_size or 1)
    plan = plan_of(config.parallel, micro_batches)  # who holds what does not depend on how many there are
    layers = stage_layers(config.model, config.parallel, plan)
    found: list[dict[str, list[Box]]] = []
    for rank in range(num_ranks):
        mpu = ParallelState.planned(config.parallel, num_ranks, rank)
        boxes: dict[str, list[Box]] = {}
        for stage in build_stages(config, mpu, plan, layers, torch.device("meta")).values():
            places = [(shard_of(parameter), parameter) for parameter in stage.parameters()]
            places += buffer_tensors(stage).get("buffer", [])
            for shard, tensor in places:
                if shard.is_saver(mpu):
                    boxes[shard.name] = [(offset, sizes) for offset, sizes, _ in shard.pieces(tensor)]
        found.append(boxes)
    return found
