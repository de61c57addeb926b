"""The executor on real ranks: any plan gives the gradients of one process, and keeps what the plan says."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megalite.mpu import ParallelConfig, ParallelState
from megalite.pipeline.executor import Executor
from megalite.pipeline.partition import partition
from megalite.pipeline.plan import Action, Kind, Plan, PlanError
from megalite.pipeline.schedule import SCHEDULES, gpipe, make_plan, one_f_one_b
from megalite.pipeline.simulate import peak_activations
from megalite.testing.world import RankFailure, World

from .plans import breadth_first, split_1f1b
from .toy import LAYERS, RecordingReducer, ToyStage, freeze, gradients, micro_losses, microbatch, reference

CPU = torch.device("cpu")
SCALE = 0.37


@dataclass(frozen=True)
class Outcome:
    """What a rank found in two steps."""

    losses: list[Tensor]
    grads: dict[str, Tensor]
    """The sum over the rank's copies of a parameter, should there be several."""
    micro_losses: list[Tensor]
    """What the last stages have returned, micro-batch after micro-batch, in the second step."""
    peaks: tuple[int, int]
    reducers: dict[int, list[str]]
    evaluated: Tensor
    messages: int


def _stages(plan: Plan, rank: int, recompute: bool = False) -> dict[int, ToyStage]:
    split = partition(LAYERS, plan.num_stages, layer_cost=1.0, embedding_cost=0.5, head_cost=1.5)
    first, last = 0, plan.num_stages - 1
    return {
        s: ToyStage(split[i := plan.model_stage(s)], first=i == first, last=i == last, recompute=recompute)
        for s in plan.stages_of(rank)
    }


def _two_steps(
    mpu: ParallelState, plan: Plan, recompute: bool = False, frozen: frozenset[str] = frozenset()
) -> Outcome:
    stages = _stages(plan, mpu.pp.rank, recompute)
    for stage in stages.values():
        freeze(stage, frozen)
    reducers = {s: RecordingReducer() for s in stages}
    executor = Executor(plan, stages, reducers, mpu, CPU)
    losses = []
    evaluated, messages, last_losses = torch.zeros(()), 0, []
    mpu.reset_stats()
    for step in range(2):
        batches = [microbatch(k, step) for k in range(plan.num_microbatches)]
        losses.append(executor.run(batches, SCALE if step else torch.tensor(SCALE, dtype=torch.float64)))
        messages = mpu.pp.stats.calls
        last_losses = _in_order(plan, stages)
        # An evaluation in between, with another number of microbatches, changes nothing.
        evaluated = executor.evaluate([microbatch(k, 0) for k in range(plan.num_microbatches + 2)])
        mpu.reset_stats()
        evaluating = [stage for number, stage in stages.items() if number < plan.num_stages]
        assert not any(stage.outputs[-1].requires_grad for stage in evaluating), "evaluated with a graph"
    return Outcome(
        losses,
        gradients(list(stages.values())),
        last_losses,
        (executor.peak_activations, executor.peak_until_weight_grad),
        {s: r.events for s, r in reducers.items()},
        evaluated,
        messages,
    )


def _in_order(plan: Plan, stages: dict[int, ToyStage]) -> list[Tensor]:
    """The losses of this rank's last stages by micro-batch: the order of forwards in the plan tells which is which."""
    found: dict[int, Tensor] = {}
    for number, stage in stages.items():
        if stage.head is not None:
            forwards = [a for row in plan.actions for a in row if (a.kind, a.stage) == (Kind.FORWARD, number)]
            outputs = stage.outputs[-len(forwards) :]
            found |= {a.microbatch: out.detach() for a, out in zip(forwards, outputs, strict=True)}
    return [found[k] for k in sorted(found)]


def _check(outcomes: list[Outcome], plan: Plan, frozen: frozenset[str] = frozenset()) -> None:
    losses, grads = reference(plan.num_microbatches, 2, SCALE, frozen)
    assert {name for outcome in outcomes for name in outcome.grads} == grads.keys()
    for name, grad in grads.items():
        found = torch.stack([outcome.grads[name] for outcome in outcomes if name in outcome.grads]).sum(0)
        difference = (found - grad).abs().max() / grad.abs().max()
        assert difference < 1e-12, f"{name} differs by {difference:.1e}"
    _check_losses(outcomes, plan, losses)
    for rank, outcome in enumerate(outcomes):
        assert outcome.reducers == {s: ["arm", "complete", "finish"] * 2 for s in plan.stages_of(rank)}
        assert outcome.peaks == (peak_activations(plan)[rank], peak_activations(plan, Kind.WEIGHT_GRAD)[rank])
        # Over each hand-over between ranks a microbatch sends an activation one way and a gradient the other.
        hand_overs = [(stage, plan.next_stage(stage)) for stage in range(len(plan.placement))]
        ends = [(plan.placement[s], plan.placement[n]) for s, n in hand_overs if n is not None]
        hops = sum((a == rank) != (b == rank) for a, b in ends)
        assert outcome.messages == plan.num_microbatches // plan.num_chains * hops


def _check_losses(outcomes: list[Outcome], plan: Plan, losses: list[Tensor]) -> None:
    """The ranks with a last stage have the sum between them, and every micro-batch has its own labels' loss."""
    last = plan.num_stages - 1
    holders = [plan.placement[stage] for stage in plan.copies_of(last)]
    zero = torch.zeros((), dtype=torch.float64)
    for step, want in enumerate(losses):
        found = sum((outcome.losses[step] for outcome in outcomes), zero)
        torch.testing.assert_close(found, want, rtol=1e-12, atol=0)
    assert all(not any(o.losses) for rank, o in enumerate(outcomes) if rank not in holders)
    evaluated = reference(plan.num_microbatches + 2, 1, SCALE)[0][0]
    for rank, outcome in enumerate(outcomes):
        want = evaluated if rank == plan.placement[last] else zero
        torch.testing.assert_close(outcome.evaluated, want, rtol=1e-12, atol=0)
    found = [loss for rank in dict.fromkeys(holders) for loss in outcomes[rank].micro_losses]
    torch.testing.assert_close(found, micro_losses(plan.num_microbatches, 1), rtol=1e-12, atol=0)


PLANS_2 = [
    *(make(2, m) for make in (one_f_one_b, gpipe, split_1f1b) for m in (1, 2, 5)),
    breadth_first((0, 1, 1, 0), 3),
    breadth_first((0, 1, 0, 1), 3),
    breadth_first((0, 0, 1, 1), 2),
    make_plan("interleaved_zb", 2, 4, 3),
]
PLANS_4 = [
    *(make(4, m) for make in (one_f_one_b, gpipe, split_1f1b) for m in (1, 3, 9)),
    breadth_first((0, 1, 2, 3, 3, 2, 1, 0), 5),
    breadth_first((0, 1, 2, 3, 0, 1, 2, 3), 5),
]


CHUNKS = {"interleaved": 2, "looped_bfs": 2, "interleaved_zb": 2}
NUMBERS = (1, 2, 3, 5, 8)
"""Of micro-batches: fewer than stages, as many, odd ones, and a multiple."""
PLAN_8 = make_plan("dualpipe", 8, 16)


def _name(plan: object) -> str:
    assert isinstance(plan, Plan)
    return f"{plan.name}-{''.join(map(str, plan.placement))}-m{plan.num_microbatches}"


@pytest.mark.parametrize("plan", [*PLANS_2, *PLANS_4, PLAN_8], ids=_name)
def test_gradients_equal_one_process(world: World, plan: Plan) -> None:
    outcomes = world.run(_two_steps, plan, layout=ParallelConfig(pp=plan.num_ranks), timeout=60)
    _check(outcomes, plan)


def _all_sizes(mpu: ParallelState, schedule: str) -> dict[int, Outcome | str]:
    """What came of 1 to 9 micro-batches, or why the plan was refused."""
    found: dict[int, Outcome | str] = {}
    for num_microbatches in NUMBERS:
        try:
            plan = make_plan(schedule, mpu.pp.size, num_microbatches, CHUNKS.get(schedule, 1))
        except PlanError as error:
            found[num_microbatches] = str(error)
        else:
            found[num_microbatches] = _two_steps(mpu, plan)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_microbatches_is_right_or_refused(world: World, schedule: str, ranks: int) -> None:
    """Fewer than stages, odd, not a multiple: never a hang. Micro-batches differ in length, and in their labels.

    One process runs the plans one after another, split and unsplit backwards, on stages of different shapes.
    """
    results = world.run(_all_sizes, schedule, layout=ParallelConfig(pp=ranks), timeout=120)
    for num_microbatches in NUMBERS:
        outcomes = [result[num_microbatches] for result in results]
        refusals = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if refusals:
            assert refusals == [refusals[0]] * ranks
            assert str(num_microbatches) in refusals[0] and str(ranks) in refusals[0], refusals[0]
            assert schedule in ("dualpipe", "dualpipe_v", "interleaved_zb"), f"{schedule} is defined for any number"
        else:
            plan = make_plan(schedule, ranks, num_microbatches, CHUNKS.get(schedule, 1))
            _check([outcome for outcome in outcomes if not isinstance(outcome, str)], plan)


@pytest.mark.parametrize("plan", [one_f_one_b(2, 3), split_1f1b(2, 3), make_plan("zb_v", 2, 3)], ids=_name)
def test_recompute(world: World, plan: Plan) -> None:
    _check(world.run(_two_steps, plan, True, layout=ParallelConfig(pp=2), timeout=60), plan)


@pytest.mark.parametrize("plan", [one_f_one_b(2, 3), split_1f1b(2, 3)], ids=_name)
def test_frozen_parameters(world: World, plan: Plan) -> None:
    """Also a first stage that is frozen altogether, and so has no backward."""
    first = _stages(plan, 0)[0]
    frozen = frozenset(name for name, _ in first.named_parameters()) | {"head"}
    _check(world.run(_two_steps, plan, False, frozen, layout=ParallelConfig(pp=2), timeout=60), plan, frozen)


@pytest.mark.parametrize("plan", [one_f_one_b(1, 3), split_1f1b(1, 3), breadth_first((0, 0, 0), 4)], ids=_name)
def test_one_rank_needs_no_process_group(plan: Plan) -> None:
    assert not torch.distributed.is_initialized()
    _check([_two_steps(ParallelState.single(), plan)], plan)


def test_output_memory_leaves_the_graph() -> None:
    """After the forward, the output of an inner stage is one element; the next stage owns the data."""
    plan = breadth_first((0, 0), 2)
    stages = _stages(plan, 0)
    Executor(plan, stages, {}, ParallelState.single(), CPU).run([microbatch(0), microbatch(1)], 1.0)
    for output in stages[0].outputs:
        assert output.untyped_storage().nbytes() == 8
        assert output.shape[2] == 6


def test_losses_are_summed_in_at_least_float32() -> None:
    class HalfStage(ToyStage):
        hidden_dtype = torch.bfloat16

    stage = HalfStage(range(1), first=True, last=True)
    executor = Executor(one_f_one_b(1, 1), {0: stage}, {}, ParallelState.single(), CPU)
    assert executor.run([microbatch(0)], 1.0).dtype == torch.float32


def test_trace_sees_every_action_in_order() -> None:
    plan = split_1f1b(1, 2)
    seen: list[tuple[Action, float, float]] = []
    executor = Executor(
        plan, _stages(plan, 0), {}, ParallelState.single(), CPU, trace=lambda *event: seen.append(event)
    )
    executor.run([microbatch(0), microbatch(1)], 1.0)
    assert " ".join(str(action) for action, _, _ in seen) == "F0.0 I0.0 F0.1 I0.1 W0.0 REDUCE0.1 W0.1"
    times = [t for _, begin, end in seen for t in (begin, end)]
    assert times == sorted(times)


def test_input_gradients_leave_the_weights_to_w() -> None:
    plan = split_1f1b(1, 3)
    stages = _stages(plan, 0)
    uses = 2 * LAYERS  # each layer's weight is used twice
    waiting: list[tuple[str, int]] = []
    executor = Executor(
        plan, stages, {}, ParallelState.single(), CPU,
        trace=lambda action, *_: waiting.append((str(action), stages[0].queue.num_waiting)),
    )  # fmt: skip
    executor.run([microbatch(k) for k in range(3)], 1.0)
    assert [entry for entry in waiting if entry[0][0] in "IW"] == [
        ("I0.0", uses), ("I0.1", 2 * uses), ("W0.0", uses), ("I0.2", 2 * uses), ("W0.1", uses), ("W0.2", 0),
    ]  # fmt: skip


def test_wrong_number_of_microbatches_is_refused() -> None:
    plan = one_f_one_b(1, 2)
    executor = Executor(plan, _stages(plan, 0), {}, ParallelState.single(), CPU)
    with pytest.raises(PlanError, match="1 microbatches for 1f1b, planned for 2"):
        executor.run([microbatch(0)], 1.0)
    with pytest.raises(PlanError, match=r"for 2 pipeline ranks; parallel.pp=1"):
        Executor(one_f_one_b(2, 2), {}, {}, ParallelState.single(), CPU)


def test_weight_gradients_left_in_a_queue_are_an_error() -> None:
    plan = one_f_one_b(1, 1)
    stages = _stages(plan, 0)
    stages[0].queue.deferring = True  # as a faulty stage might leave it
    executor = Executor(plan, stages, {}, ParallelState.single(), CPU)
    with pytest.raises(AssertionError, match="stage 0: 16 weight gradients not run"):
        executor.run([microbatch(0)], 1.0)


class _FailingStage(ToyStage):
    def forward(self, x: Tensor | None, batch: object) -> Tensor:
        raise RuntimeError("out of luck")


def test_error_names_the_action() -> None:
    stage = _FailingStage(range(1), first=True, last=True)
    executor = Executor(one_f_one_b(1, 1), {0: stage}, {}, ParallelState.single(), CPU)
    with pytest.raises(RuntimeError, match="out of luck") as error:
        executor.run([microbatch(0)], 1.0)
    assert error.value.__notes__ == ["in action F0.0 of 1f1b on pipeline rank 0"]


def _number_of_stages(mpu: ParallelState) -> int:
    return int(mpu.pp.all_reduce(torch.ones(())))


def test_pipelines_of_any_length_follow_each_other(world: World) -> None:
    """Ranks that have made different numbers of groups (only the ends of a pipeline have embd) still meet."""
    for size in (4, 2, 3, 4):
        assert world.run(_number_of_stages, layout=ParallelConfig(pp=size)) == [size] * size


def _different_plans(mpu: ParallelState) -> str:
    plan = (one_f_one_b, gpipe)[mpu.pp.rank](2, 3)
    with pytest.raises(PlanError) as error:
        Executor(plan, _stages(plan, mpu.pp.rank), {}, mpu, CPU)
    return str(error.value)


def test_different_plans_are_refused_on_every_rank(world: World) -> None:
    messages = world.run(_different_plans, layout=ParallelConfig(pp=2))
    assert messages[0] == messages[1]
    assert "rank 0: 1f1b with 3 microbatches" in messages[0] and "rank 1: gpipe with 3" in messages[0]


def _fail_in_the_middle(mpu: ParallelState) -> None:
    plan = one_f_one_b(2, 3)
    stages = _stages(plan, mpu.pp.rank) if mpu.pp.rank == 0 else {1: _FailingStage(range(1), first=False, last=True)}
    Executor(plan, stages, {}, mpu, CPU).run([microbatch(k) for k in range(3)], 1.0)


def test_a_rank_that_raises_is_named_and_the_waiting_one_reported(world: World) -> None:
    with pytest.raises(RankFailure) as error:
        world.run(_fail_in_the_middle, layout=ParallelConfig(pp=2))
    assert error.value.ranks == (1,)
    assert "in action F1.0 of 1f1b on pipeline rank 1" in str(error.value)
    assert "receive on axis pp" in str(error.value)
