"""What must hold for every schedule, at random sizes and costs."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.pipeline.lower import lower
from megalite.pipeline.schedule import SCHEDULES, Action, Kind, Plan, PlanError, check_complete, make_plan
from megalite.pipeline.simulate import Costs, Slot, Time, peak_activations, simulate

LOOPED = ("interleaved", "looped_bfs", "interleaved_zb")

times = st.fractions(min_value=Fraction(1, 4), max_value=4, max_denominator=8)
all_costs = st.builds(
    Costs,
    forward=times,
    input_grad=times,
    weight_grad=times,
    latency=st.fractions(min_value=0, max_value=1, max_denominator=8),
)
quick = settings(max_examples=60, deadline=None, derandomize=True)


def _plan(name: str, p: int, m: int, v: int, costs: Costs | None = None) -> Plan | None:
    """The plan; None when it is refused, which only these may be."""
    try:
        return make_plan(name, p, m, v if name in LOOPED else 1, costs=costs)
    except PlanError:
        assert (
            (name == "dualpipe" and (p % 2 or m % 2 or m < 2 * p))
            or (name == "dualpipe_v" and m < 2 * p)
            or (name == "interleaved_zb" and m % max(1, m // p))
        )
        return None


@quick
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 7), st.integers(1, 18), st.integers(1, 4), all_costs)
def test_plans_are_complete_can_run_and_waste_only_the_bubble(name: str, p: int, m: int, v: int, costs: Costs) -> None:
    plan = _plan(name, p, m, v, costs)
    if plan is None:
        return
    check_complete(plan)
    lowered = lower(plan)  # under both models of message passing
    assert [lowered.compute(rank) for rank in range(p)] == list(plan.actions)
    for fb in ("atomic", "seq"):
        timed = simulate(plan, costs, fb)
        work = m * (costs.forward + costs.input_grad + costs.weight_grad)
        assert timed.busy == [work] * p and timed.ideal == work
        assert work <= timed.span <= timed.makespan
        assert timed.bubble_global == Fraction(sum(timed.idle)) / (timed.makespan * p)
        _check_order(plan, timed.slots)


def _check_order(plan: Plan, slots: tuple[Slot, ...]) -> None:
    """Nothing starts before what it needs has ended, and nobody does two things at once."""
    ends: dict[Action, Time] = {}
    free: list[Time] = [0] * plan.num_ranks
    for rank, action, start, end in slots:
        if action not in plan.pairs and action.kind is not Kind.BACKWARD:
            assert all(ends[need] <= start for need in plan.needs(action))
        assert start >= free[rank]
        free[rank] = end
        if action.kind is Kind.BACKWARD:
            ends[action._replace(kind=Kind.INPUT_GRAD)] = ends[action._replace(kind=Kind.WEIGHT_GRAD)] = end
        else:
            ends[action] = end


@quick
@given(st.integers(1, 8), st.integers(1, 20), all_costs)
def test_gpipe_and_1f1b_have_one_bubble(p: int, m: int, costs: Costs) -> None:
    work = costs.forward + costs.input_grad + costs.weight_grad
    for name in ("gpipe", "1f1b"):
        plan = make_plan(name, p, m)
        timed = simulate(plan, Costs(forward=costs.forward, input_grad=costs.input_grad, weight_grad=costs.weight_grad))
        assert timed.makespan == (m + p - 1) * work
        assert timed.bubble_global == Fraction(p - 1, m + p - 1)
        peaks = [m] * p if name == "gpipe" else [min(m, p - r) for r in range(p)]
        assert peak_activations(plan) == peak_activations(plan, Kind.WEIGHT_GRAD) == peaks


@quick
@given(st.integers(2, 8), st.integers(1, 12), st.fractions(Fraction(1, 2), 1, max_denominator=8))
def test_zero_bubble_with_one_chunk(p: int, more: int, w: Fraction) -> None:
    costs = Costs(weight_grad=w)
    h1, h2 = (make_plan(name, p, 2 * p - 1 + more, costs=costs) for name in ("zb_h1", "zb_h2"))
    m = h1.num_microbatches
    assert simulate(h1, costs).makespan - m * (2 + w) == (p - 1) * (2 - w)
    assert simulate(h2, costs).span - m * (2 + w) == (p - 1) * (2 - 2 * w)
    assert peak_activations(h1, Kind.WEIGHT_GRAD) == [p] * p
    assert peak_activations(h2, Kind.WEIGHT_GRAD) == [2 * p - 1] * p
    assert peak_activations(h1) == [p - r for r in range(p)]
    assert peak_activations(h2) == [2 * (p - 1 - r) + 1 for r in range(p)]


@quick
@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 4), all_costs)
def test_looped_bubbles_shrink_with_the_chunks(p: int, groups: int, v: int, costs: Costs) -> None:
    m, free = p * groups, Costs(forward=costs.forward, input_grad=costs.input_grad, weight_grad=costs.weight_grad)
    work = m * (costs.forward + costs.input_grad + costs.weight_grad)
    for name in ("interleaved", "looped_bfs"):
        assert simulate(make_plan(name, p, m, v), free).makespan - work == Fraction(p - 1, v) * work / m
    plan = make_plan("interleaved", p, m, v)
    assert peak_activations(plan) == [min(m * v, (v - 1) * p + 2 * (p - 1 - r) + 1) for r in range(p)]
    assert peak_activations(make_plan("looped_bfs", p, m, v)) == [m * v] * p
    zb, even = make_plan("interleaved_zb", p, m, v), Costs(weight_grad=Fraction(4, 5))
    assert simulate(zb, even).makespan - m * Fraction(14, 5) == Fraction(p - 1, v) * Fraction(6, 5)
    assert peak_activations(zb, Kind.WEIGHT_GRAD) == [v * p] * p


@settings(quick, max_examples=25)
@given(st.integers(1, 8), st.integers(0, 8))
def test_v_shapes(p: int, more: int) -> None:
    m = 2 * p + more
    zb_v = make_plan("zb_v", p, m)
    assert simulate(zb_v).span == 3 * m and simulate(zb_v).makespan == 3 * m + Fraction(p - 1, 2)
    assert peak_activations(zb_v, Kind.WEIGHT_GRAD) == [2 * p] * p
    dualpipe_v = make_plan("dualpipe_v", p, m)
    assert simulate(dualpipe_v).makespan == 3 * m + (p - 1)
    assert peak_activations(dualpipe_v, Kind.WEIGHT_GRAD) == [2 * p + 1] * p
    if p >= 3:
        half, least = make_plan("v_half", p, m), make_plan("v_min", p, m)
        assert 2 * simulate(half).idle[0] <= (3 * p - 4 if p % 2 else 3 * p - 7)
        assert 2 * simulate(least).idle[0] <= 4 * p - 5 - (p % 3 == 0)
        assert max(peak_activations(half, Kind.WEIGHT_GRAD)) == 2 * ((p + 2) // 2)
        assert max(peak_activations(least, Kind.WEIGHT_GRAD)) == 2 * ((p + 4) // 3)


@quick
@given(st.integers(1, 4), st.integers(0, 6), st.fractions(Fraction(1, 2), 1, max_denominator=8))
def test_dualpipe(half: int, more: int, w: Fraction) -> None:
    p, m, costs = 2 * half, 4 * half + 2 * more, Costs(weight_grad=w)
    plan = make_plan("dualpipe", p, m)
    fb, b = 2 + w, 1 + w
    assert simulate(plan, costs).makespan - m * (2 + w) == (half - 1) * (fb + b - 3 * w)
    assert peak_activations(plan, Kind.WEIGHT_GRAD) == [p + 1] * p
    assert plan.num_stages == p and plan.num_chains == 2
    for model_stage in range(p):
        a, b_copy = plan.copies_of(model_stage)
        assert plan.placement[a] == model_stage and plan.placement[b_copy] == p - 1 - model_stage
    for row in plan.actions:
        for action in row:
            assert plan.chain_of(action.microbatch) == action.stage // p
            assert plan.model_stage(action.stage) == action.stage % p
