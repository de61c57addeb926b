"""Schedules, their simulation and their lowering, without any process."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from megalite.pipeline.lower import check_deadlock_free, lower
from megalite.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Plan,
    PlanError,
    check_complete,
    dualpipe,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved,
    make_plan,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from megalite.pipeline.simulate import Costs, peak_activations, simulate

from .plans import breadth_first, split_1f1b


def _rows(plan: Plan) -> list[str]:
    return [" ".join(map(str, row)) for row in plan.actions]


def test_1f1b_as_in_the_paper() -> None:
    assert _rows(one_f_one_b(3, 4)) == [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3",
    ]


def test_gpipe_as_in_the_paper() -> None:
    assert _rows(gpipe(2, 2)) == ["F0.0 F0.1 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1"]


def test_one_stage_is_gradient_accumulation() -> None:
    assert _rows(lower(one_f_one_b(1, 3))) == ["F0.0 B0.0 F0.1 B0.1 F0.2 REDUCE0.2 B0.2"]


def test_zb_h1_as_in_the_paper() -> None:
    assert _rows(zb_h1(3, 4)) == [
        "F0.0 F0.1 F0.2 I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3",
        "F1.0 F1.1 I1.0 F1.2 I1.1 W1.0 F1.3 I1.2 W1.1 I1.3 W1.2 W1.3",
        "F2.0 I2.0 F2.1 I2.1 F2.2 I2.2 W2.0 F2.3 I2.3 W2.1 W2.2 W2.3",
    ]


def _by_formula(num_ranks: int, num_microbatches: int, depth: int) -> list[str]:
    """ZB-H as two numbers for each rank: warmup depth (p - 1 - r), W late by depth r."""
    lines = []
    for rank in range(num_ranks):
        warmup, lag = depth * (num_ranks - 1 - rank), depth * rank
        row = [f"F{rank}.{k}" for k in range(warmup)]
        for k in range(num_microbatches):
            row += [f"F{rank}.{warmup + k}"] if warmup + k < num_microbatches else []
            row += [f"I{rank}.{k}"] + ([f"W{rank}.{k - lag}"] if k >= lag else [])
        lines.append(" ".join(row + [f"W{rank}.{k}" for k in range(num_microbatches - lag, num_microbatches)]))
    return lines


def test_zb_h_is_the_formula_for_equal_costs() -> None:
    for p in range(2, 7):
        for plan, depth in ((zb_h1(p, 3 * p), 1), (zb_h2(p, 3 * p), 2)):
            assert _rows(plan) == _by_formula(p, 3 * p, depth)


def test_interleaved_as_in_the_paper() -> None:
    assert _rows(interleaved(2, 4)) == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


def test_interleaved_group_size() -> None:
    assert _rows(interleaved(2, 4, 2, group_size=4))[0].startswith("F0.0 F0.1 F0.2 F0.3 F2.0 F2.1 F2.2")
    assert peak_activations(interleaved(2, 8, 2, 4)) == [7, 5]
    # A short last group blocks itself: by default all microbatches go together, an explicit size is refused.
    assert interleaved(4, 5, 4) == interleaved(4, 5, 4, group_size=5)
    with pytest.raises(
        PlanError, match=r"group_size=4 deadlocks with 4 ranks, 5 microbatches and 4 chunks; .* will do: 5$"
    ):
        interleaved(4, 5, 4, group_size=4)
    with pytest.raises(PlanError, match=r"group_size=6 must be from 1 to the number of microbatches, 5; .* do: 5$"):
        make_plan("interleaved", 4, 5, 2, group_size=6)
    with pytest.raises(PlanError, match=r"group_size=-3 must be from 1 .* do: 5$"):
        interleaved(4, 5, 4, group_size=-3)
    with pytest.raises(PlanError, match=r"group_size=4 deadlocks with 4 ranks, 9 .* will do: 3 and 5$"):
        interleaved(4, 9, 3, group_size=4)
    with pytest.raises(PlanError, match=r"parallel\.group_size=2 is for the interleaved schedule; leave it"):
        make_plan("zb_v", 4, 5, 2, group_size=2)


def test_fewer_microbatches_than_stages_never_hang() -> None:
    for schedule in SCHEDULES:
        for p, v, m in ((4, 1, 1), (4, 1, 2), (4, 1, 3), (2, 2, 3), (4, 2, 1), (8, 2, 9)):
            try:
                lower(make_plan(schedule, p, m, v if schedule in ("interleaved", "interleaved_zb") else 1))
            except PlanError as error:
                assert f"{m} microbatches" in str(error) and schedule in ("dualpipe", "dualpipe_v", "interleaved_zb")


def test_dualpipe_has_two_chains() -> None:
    plan = dualpipe(4, 8)
    assert plan.num_stages == 4 and plan.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert plan.stages_of(0) == (0, 7) and plan.model_stage(7) == 3 and plan.copies_of(3) == (3, 7)
    assert [plan.chain_of(k) for k in range(8)] == [0] * 4 + [1] * 4
    assert plan.previous_stage(4) is None and plan.next_stage(3) is None and plan.next_stage(4) == 5
    assert plan.microbatches_of(5) == range(4, 8)
    assert _rows(plan)[0].startswith("F0.0 F0.1 F0.2 F7.4 I7.4 W7.4 F7.5 F0.3 B7.5 F7.6 B0.0 B7.6 F7.7 B0.1")
    assert str(plan).splitlines()[1].startswith("rank 0: F0.0 F0.1 F0.2 F7.4 I7.4 W7.4 F7.5 F0.3+ B7.5 F7.6+ B0.0")


def test_pairs_are_priced_as_one_slot_or_as_they_run() -> None:
    plan = dualpipe_v(4, 8)
    assert simulate(plan).makespan == 27
    assert simulate(plan, fb="seq").makespan == Fraction(51, 2)
    # What a pair produces is there at the pair's end only.
    pair = next(i for i, slot in enumerate(simulate(plan).slots) if slot.action in plan.pairs)
    first, second = simulate(plan).slots[pair : pair + 2]
    assert first.rank == second.rank and first.end == second.start and second.action.kind is Kind.BACKWARD


def test_latency_is_paid_between_ranks_only() -> None:
    # The one microbatch passes 3 ranks forth and back: 9 units of work and 4 hops.
    assert simulate(one_f_one_b(3, 1), Costs(latency=Fraction(1, 4))).makespan == 10
    assert simulate(one_f_one_b(1, 1), Costs(latency=Fraction(1, 4))).makespan == 3
    # A V over two ranks: 4 chunks of half a share; of the 6 hand-overs the two in the turn are local.
    assert simulate(breadth_first((0, 1, 1, 0), 1), Costs(latency=Fraction(1, 4))).makespan == 7


def test_uneven_stages_are_priced_by_stage() -> None:
    timed = simulate(one_f_one_b(2, 4), Costs(stage_share=(1, 2)))
    assert timed.busy == [12, 24]
    assert timed.makespan == 1 + 24 + 2


def test_deferred_weight_gradients_hold_their_activation() -> None:
    plan = split_1f1b(2, 6)
    assert peak_activations(plan) == [2, 1]
    assert peak_activations(plan, Kind.WEIGHT_GRAD) == [3, 2]


@pytest.mark.parametrize("p", range(1, 9))
def test_lowered_plans_never_deadlock(p: int) -> None:
    v_placement = (*range(p), *reversed(range(p)))
    for m in range(1, 17):
        for plan in (
            gpipe(p, m),
            one_f_one_b(p, m),
            split_1f1b(p, m),
            breadth_first(v_placement, m),
            breadth_first(tuple(range(p)) * 3, m),
            forward_only(tuple(range(p)), m),
            forward_only(v_placement, m),
            forward_only(tuple(range(p)) * 3, m),
        ):
            lowered = lower(plan)  # checks both models
            assert [lowered.compute(rank) for rank in range(p)] == list(plan.actions)
            assert lower(lowered) == lowered


def test_messages_and_reductions_of_a_lowered_plan() -> None:
    for plan in (one_f_one_b(4, 6), breadth_first((0, 1, 1, 0), 3), split_1f1b(3, 4)):
        lowered = lower(plan)
        actions = [action for row in lowered.actions for action in row]
        hops = sum(a != b for a, b in pairwise(plan.placement))
        for kind in (Kind.SEND_ACT, Kind.RECV_ACT, Kind.SEND_GRAD, Kind.RECV_GRAD):
            assert sum(action.kind is kind for action in actions) == hops * plan.num_microbatches
        for row in lowered.actions:
            for stage in {action.stage for action in row}:
                weights = [
                    a for a in row if a.stage == stage and a.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD, Kind.REDUCE)
                ]
                assert [i for i, a in enumerate(weights) if a.kind is Kind.REDUCE] == [len(weights) - 2]


def test_one_stage_has_no_messages() -> None:
    assert {action.kind for action in lower(gpipe(1, 4)).actions[0]} == {Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE}


def test_pairs_of_ranks_see_their_messages_in_one_order() -> None:
    # In a V, activations of one chunk and gradients of the other share a direction.
    lowered = lower(breadth_first((0, 1, 2, 2, 1, 0), 5))
    swapped = [list(row) for row in lowered.actions]
    receives = [i for i, a in enumerate(swapped[1]) if a.kind is Kind.RECV_ACT and a.stage == 1]
    swapped[1][receives[0]], swapped[1][receives[1]] = swapped[1][receives[1]], swapped[1][receives[0]]
    with pytest.raises(PlanError, match=r"SEND_ACT0\.0 would arrive as RECV_ACT1\.1"):
        check_deadlock_free(replace(lowered, actions=tuple(map(tuple, swapped))))


def test_naive_receives_deadlock_and_are_refused() -> None:
    """1F1B with each RECV just before its use and each SEND right after: both neighbours send at once."""
    rows = []
    for rank, row in enumerate(one_f_one_b(2, 4).actions):
        naive = []
        for action in row:
            if action.kind is Kind.FORWARD:
                naive += [action, action._replace(kind=Kind.SEND_ACT)] if rank == 0 else [
                    action._replace(kind=Kind.RECV_ACT), action
                ]  # fmt: skip
            else:
                naive += [action._replace(kind=Kind.RECV_GRAD), action] if rank == 0 else [
                    action, action._replace(kind=Kind.SEND_GRAD)
                ]  # fmt: skip
        rows.append(tuple(naive))
    with pytest.raises(PlanError, match="deadlocks with blocking rendezvous: rank 0 waits at"):
        check_deadlock_free(replace(one_f_one_b(2, 4), actions=tuple(rows)))


def test_message_posted_at_one_end_only_is_refused() -> None:
    lowered = lower(one_f_one_b(2, 1))
    without = tuple(a for a in lowered.actions[0] if a.kind is not Kind.RECV_GRAD)
    with pytest.raises(PlanError, match="deadlocks"):
        check_deadlock_free(replace(lowered, actions=(without, lowered.actions[1])))


def test_completion_order_respects_every_dependency() -> None:
    for p, m in ((3, 5), (4, 2)):
        seen: set[Action] = set()
        plan = one_f_one_b(p, m)
        for slot in simulate(plan).slots:
            kind = {Kind.BACKWARD: Kind.INPUT_GRAD}.get(slot.action.kind, slot.action.kind)
            assert set(plan.needs(slot.action)) <= seen
            seen.add(slot.action._replace(kind=kind))


def _without(plan: Plan, removed: Action) -> Plan:
    return replace(plan, actions=tuple(tuple(a for a in row if a != removed) for row in plan.actions))


def _with(plan: Plan, rank: int, added: Action) -> Plan:
    rows = list(plan.actions)
    rows[rank] = (*rows[rank], added)
    return replace(plan, actions=tuple(rows))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (_without(one_f_one_b(2, 3), Action(Kind.BACKWARD, 1, 2)), r"2 results are never produced, .* \w1\.2"),
        (_with(one_f_one_b(2, 3), 1, Action(Kind.FORWARD, 1, 0)), r"rank 1 does F1\.0 twice"),
        (_with(one_f_one_b(2, 3), 1, Action(Kind.WEIGHT_GRAD, 1, 0)), r"rank 1 does W1\.0 twice"),
        (_with(one_f_one_b(2, 3), 0, Action(Kind.FORWARD, 0, 3)), r"F0\.3 on rank 0 is not in a plan of 2 .* 3"),
        (_with(one_f_one_b(2, 3), 0, Action(Kind.FORWARD, 1, 0)), r"F1\.0 is on rank 0, its stage on 1"),
        (_with(forward_only((0, 1), 3), 0, Action(Kind.BACKWARD, 0, 0)), r"B0\.0 .* not in a forward-only plan"),
        (replace(one_f_one_b(2, 3), placement=(0, 2)), "stage 1 is placed on rank 2 of 2"),
        (replace(one_f_one_b(2, 3), placement=(0,)), r"1 stages leave ranks \[1\] without any"),
    ],
)  # fmt: skip
def test_incomplete_plans_are_refused_with_the_reason(plan: Plan, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        check_complete(plan)


def test_impossible_order_is_refused_with_who_waits_for_what() -> None:
    plan = one_f_one_b(2, 2)
    early = tuple(sorted(plan.actions[0], key=lambda action: action.microbatch))  # F0.0 B0.0 F0.1 B0.1: legal
    simulate(replace(plan, actions=(early, plan.actions[1])))
    crossed = (plan.actions[1][2:] + plan.actions[1][:2],)  # the last rank begins with microbatch 1
    with pytest.raises(PlanError, match=r"rank 0 waits before B0\.0 for I1\.0 of rank 1; rank 1 waits before F1\.1"):
        simulate(replace(plan, actions=(early, *crossed)))


def test_sizes_and_names_are_checked() -> None:
    with pytest.raises(PlanError, match=r"unknown parallel.schedule='1f1'; it can be 1f1b, gpipe, .* or csv:FILE"):
        make_plan("1f1", 2, 4)
    with pytest.raises(PlanError, match=r"parallel.vpp=2 must be 1"):
        make_plan("1f1b", 2, 4, 2)
    with pytest.raises(PlanError, match="0 microbatches"):
        make_plan("gpipe", 2, 0)
    with pytest.raises(PlanError, match=r"zb_v always has two chunks on each rank; parallel.vpp=3 must be 1 or 2"):
        make_plan("zb_v", 2, 4, 3)
    assert make_plan("zb_v", 2, 4, 1) == make_plan("zb_v", 2, 4, 2)
    with pytest.raises(PlanError, match=r"dualpipe: 3 pipeline ranks and 8 microbatches; both must be even"):
        make_plan("dualpipe", 3, 8)
    with pytest.raises(PlanError, match=r"interleaved_zb: 11 microbatches do not divide .* 8 or 12 would"):
        make_plan("interleaved_zb", 4, 11, 2)


def test_digest_tells_plans_apart() -> None:
    digests = {make_plan(name, 2, m).digest for name in SCHEDULES for m in (4, 6)}
    assert len(digests) == 2 * len(SCHEDULES) and one_f_one_b(2, 4).digest in digests
