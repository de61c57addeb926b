"""Collectives on living ranks: what they return, what they count, and what the last call says."""

import torch
from torch import Tensor

from megalite.axis import LastCall
from megalite.mpu import ParallelConfig, ParallelState
from megalite.testing.world import World


def _collectives(mpu: ParallelState) -> dict[str, Tensor | object]:
    axis, rank = mpu.tp, float(mpu.tp.rank)
    row = torch.arange(6.0).view(2, 3) + 10 * rank
    received = torch.empty(2)
    left, right = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
    sending = axis.send(torch.tensor([rank, rank]), right)
    axis.receive(received, left).wait()
    sending.wait()
    return {
        "sum": axis.all_reduce(row.clone()),
        "max": axis.all_reduce(row.clone(), "max"),
        "min": axis.all_reduce(row.clone(), "min"),
        "gather0": axis.all_gather(row),
        "gather1": axis.all_gather(row, 1),
        "scatter0": axis.reduce_scatter(torch.arange(8.0) + rank),
        "scatter1": axis.reduce_scatter((torch.arange(8.0) + rank).view(1, 8), 1),
        "exchange": axis.all_to_all(torch.arange(4.0) + 10 * rank),
        "uneven": axis.all_to_all(
            torch.full((10,), rank), [1, 2, 3, 4], [axis.rank + 1] * 4
        ),
        "broadcast": axis.broadcast(torch.tensor([rank]), 2),
        "received": received,
        "objects": axis.gather_objects({"rank": axis.rank}),
    }  # fmt: skip


def test_what_collectives_return(world: World) -> None:
    for rank, found in enumerate(world.run(_collectives, layout=ParallelConfig(tp=4))):
        rows = [torch.arange(6.0).view(2, 3) + 10 * r for r in range(4)]
        expected = {
            "sum": sum(rows),
            "max": rows[3],
            "min": rows[0],
            "gather0": torch.cat(rows),
            "gather1": torch.cat(rows, 1),
            "scatter0": (4 * torch.arange(8.0) + 6)[2 * rank : 2 * rank + 2],
            "scatter1": (4 * torch.arange(8.0) + 6)[None, 2 * rank : 2 * rank + 2],
            "exchange": torch.tensor([rank + 10.0 * r for r in range(4)]),
            "uneven": torch.arange(4.0).repeat_interleave(rank + 1),
            "broadcast": torch.tensor([2.0]),
            "received": torch.tensor([(rank - 1.0) % 4] * 2),
        }
        for name, value in expected.items():
            assert torch.equal(found[name], value), (rank, name, found[name])
        assert found["objects"] == [{"rank": r} for r in range(4)]


def _count(mpu: ParallelState) -> dict[str, tuple[int, int]]:
    axis, x = mpu.tp, torch.zeros(8, 3, dtype=torch.float64)
    axis.all_reduce(x)
    axis.all_gather(x)
    axis.reduce_scatter(x)
    axis.all_to_all(x)
    axis.all_to_all(torch.zeros(10, dtype=torch.float64), [1, 2, 3, 4], [axis.rank + 1] * 4)
    axis.broadcast(x, 1)
    mpu.dp.all_reduce(x)  # of size 1: counts nothing
    axis.all_reduce(x)
    sent = {site.rpartition(":")[2]: (entry.calls, entry.bytes_sent) for site, entry in axis.stats.by_site.items()}
    assert all(site.startswith("tests.test_axis._count:") for site in axis.stats.by_site), axis.stats.by_site
    assert axis.stats.calls == 7 and axis.stats.bytes_sent == sum(size for _, size in sent.values())
    assert mpu.dp.stats.calls == 0 and mpu.dp.stats.bytes_sent == 0
    mpu.reset_stats()
    assert axis.stats.calls == 0
    return sent


def test_bytes_are_those_of_the_optimal_algorithms(world: World) -> None:
    """Of a tensor of S bytes over n ranks; in the uneven exchange a rank keeps rank + 1 of 10 rows."""
    size, n = 8 * 3 * 8, 4
    for rank, sent in enumerate(world.run(_count, layout=ParallelConfig(tp=n))):
        assert sent == {
            "all_reduce": (2, 2 * (2 * (n - 1) * size // n)),
            "all_gather": (1, (n - 1) * size),
            "reduce_scatter": (1, (n - 1) * size // n),
            "all_to_all": (2, (n - 1) * size // n + (10 - (rank + 1)) * 8),
            "broadcast": (1, size if rank == 1 else 0),
        }


def _last_calls(mpu: ParallelState) -> list[tuple[str, str, bool]]:
    call, seen = mpu.last_call, []

    def note() -> None:
        seen.append((call.axis, call.operation, call.finished))

    note()
    pending = mpu.tp.start_all_reduce(torch.ones(1))
    note()
    mpu.dp.all_gather(torch.ones(1))
    note()
    pending.wait()
    note()
    return seen


def test_the_last_call_follows_what_a_rank_waits_for(world: World) -> None:
    for seen in world.run(_last_calls, layout=ParallelConfig(tp=2), ranks=4):
        assert seen == [
            ("none", "none", True),
            ("tp", "all_reduce", False),
            ("dp", "all_gather", True),
            ("tp", "all_reduce", True),
        ]


def test_last_call_says_how_long() -> None:
    call = LastCall()
    call.enter("tp", "all_gather", "nn.mlp.ParallelMLP.forward")
    assert str(call) == "all_gather on axis tp from nn.mlp.ParallelMLP.forward (waiting for 0 s)"
    call.finished = True
    assert str(call).endswith("(finished)")
