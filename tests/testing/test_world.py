"""The test world: results, layouts, and what it says about ranks that raise, hang or die."""

import os
import signal
import time

import pytest
import torch

from megalite.mpu import ParallelConfig, ParallelState
from megalite.testing.world import RankFailure, World, fewest_ranks


def _places(mpu: ParallelState, word: str) -> tuple[int, int, int, str, float]:
    total = mpu.tp.all_reduce(torch.tensor([float(mpu.rank)]))
    return mpu.rank, mpu.tp.rank, mpu.dp.rank, word, total.item()


def test_results_come_back_in_rank_order(world: World) -> None:
    layout = ParallelConfig(tp=2)
    assert world.run(_places, "x", layout=layout, ranks=4) == [
        (0, 0, 0, "x", 1.0),
        (1, 1, 0, "x", 1.0),
        (2, 0, 1, "x", 5.0),
        (3, 1, 1, "x", 5.0),
    ]


def _pid(mpu: ParallelState) -> int:
    return os.getpid()


def test_ranks_stay_between_calls(world: World) -> None:
    world.run(_pid, ranks=4)
    assert world.run(_pid, ranks=2) == world.run(_pid, layout=ParallelConfig(tp=4))[:2]


def test_one_rank_needs_no_group(world: World) -> None:
    assert world.run(_places, "alone") == [(0, 0, 0, "alone", 0.0)]


def _tensor(mpu: ParallelState, given: torch.Tensor) -> torch.Tensor:
    return given + mpu.rank


def test_tensors_travel_by_value(world: World) -> None:
    results = world.run(_tensor, torch.arange(3.0, dtype=torch.float64), ranks=2)
    assert torch.equal(results[1], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


def _set_defaults(mpu: ParallelState) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def _get_defaults(mpu: ParallelState) -> tuple[torch.dtype, bool, int]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()


def test_a_call_leaves_no_settings_behind(world: World) -> None:
    world.run(_set_defaults, ranks=1)
    assert world.run(_get_defaults, ranks=1) == [(torch.float32, True, 1)]


def test_impossible_layout_is_the_callers_error(world: World) -> None:
    with pytest.raises(ValueError, match="tp \\* cp \\* pp"):
        world.run(_pid, layout=ParallelConfig(tp=3), ranks=4)
    with pytest.raises(ValueError, match="at most 8"):
        world.run(_pid, ranks=9)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (ParallelConfig(), 1),
        (ParallelConfig(tp=2, pp=2), 4),
        (ParallelConfig(ep=2), 2),
        (ParallelConfig(ep=4, tp=2), 4),
        (ParallelConfig(ep=4, tp=2, pp=2), 8),
    ],
)
def test_fewest_ranks(layout: ParallelConfig, ranks: int) -> None:
    assert fewest_ranks(layout) == ranks


def _one_raises(mpu: ParallelState) -> None:
    if mpu.rank == 1:
        raise ValueError("the reason")
    mpu.tp.all_reduce(torch.ones(3))


def test_a_raise_comes_first_and_the_waiting_ranks_are_named(world: World) -> None:
    with pytest.raises(RankFailure) as caught:
        world.run(_one_raises, layout=ParallelConfig(tp=4))
    assert caught.value.kind == "raised"
    assert caught.value.ranks == (1,)
    first, *rest = str(caught.value).splitlines()
    assert first == "rank 1 of 4 raised in _one_raises"
    text = "\n".join(rest)
    assert text.index("ValueError: the reason") < text.index("waiting in all_reduce on axis tp")
    assert "tests.testing.test_world._one_raises: ranks 0, 2, 3" in text
    assert "mpu.tp.all_reduce(torch.ones(3))" in text, "stacks show the line that waits"
    assert world.run(_places, "again", layout=ParallelConfig(tp=2))[1] == (1, 1, 0, "again", 1.0)


def _started(world: World, layout: ParallelConfig | None = None, ranks: int | None = None) -> World:
    """A world whose ranks and groups are there, so that a short limit is the limit of the call alone."""
    world.run(_places, "start", layout=layout, ranks=ranks)
    return world


def _one_is_absent(mpu: ParallelState) -> None:
    if mpu.rank == 2:
        time.sleep(3600)
    mpu.dp.all_gather(torch.ones(3))


def test_a_hang_names_the_collective_and_the_absent_rank(world: World) -> None:
    with pytest.raises(RankFailure) as caught:
        _started(world, ranks=4).run(_one_is_absent, ranks=4, timeout=5)
    text = str(caught.value)
    assert caught.value.kind == "hung"
    assert "has not finished after 5 s on ranks 0, 1, 2, 3 of 4" in text
    assert "waiting in all_gather on axis dp from tests.testing.test_world._one_is_absent: ranks 0, 1, 3" in text
    assert "running outside of any collective: ranks 2" in text
    assert "time.sleep(3600)" in text


def _async_hang(mpu: ParallelState) -> None:
    if mpu.tp.rank == 0:
        pending = mpu.tp.start_all_reduce(torch.ones(3))
        mpu.dp.all_reduce(torch.ones(1))  # a later collective that finishes is not the one that hangs
        pending.wait()
    else:
        mpu.dp.all_reduce(torch.ones(1))


def test_a_hang_in_wait_names_the_asynchronous_collective(world: World) -> None:
    with pytest.raises(RankFailure) as caught:
        _started(world, ParallelConfig(tp=2), 4).run(_async_hang, layout=ParallelConfig(tp=2), ranks=4, timeout=5)
    assert "waiting in all_reduce on axis tp" in str(caught.value)
    assert "returned: ranks 1, 3" in str(caught.value)


def _receive_hang(mpu: ParallelState) -> None:
    if mpu.rank == 1:
        mpu.pp.receive(torch.ones(3), 0).wait()


def test_a_receive_without_a_send_is_named(world: World) -> None:
    with pytest.raises(RankFailure, match=r"waiting in receive on axis pp from tests\.\S+\._receive_hang"):
        _started(world, ParallelConfig(pp=2)).run(_receive_hang, layout=ParallelConfig(pp=2), timeout=5)


def _one_dies(mpu: ParallelState) -> None:
    if mpu.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mpu.world.barrier()


def test_a_death_is_named_before_the_errors_it_causes(world: World) -> None:
    with pytest.raises(RankFailure) as caught:
        world.run(_one_dies, ranks=4)
    assert caught.value.kind == "died"
    assert str(caught.value).startswith("rank 1 of 4 was killed by SIGKILL in _one_dies")


def _blocked_interpreter(mpu: ParallelState) -> None:
    import ctypes

    ctypes.PyDLL(None).pause()  # holds the interpreter lock: only a signal handler in C can show the stack


def test_a_rank_stuck_in_c_shows_its_stack(world: World) -> None:
    with pytest.raises(RankFailure) as caught:
        world.run(_blocked_interpreter, ranks=1, timeout=3)
    assert "in _blocked_interpreter" in str(caught.value)


def _unpicklable(mpu: ParallelState) -> object:
    return lambda: 1


def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank(world: World) -> None:
    with pytest.raises(RankFailure, match="rank 0 of 1 raised"):
        world.run(_unpicklable, ranks=1)


def test_no_process_is_left_behind() -> None:
    with World() as short:
        pids = short.run(_pid, ranks=3)
        assert pids == short.pids
        with pytest.raises(RankFailure):
            short.run(_one_is_absent, ranks=3, timeout=2)
        pids += short.run(_pid, ranks=3)
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
