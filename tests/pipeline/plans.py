"""Plans beside the library's own, to show that the executor and the checks do not depend on the schedule."""

from megalite.pipeline.schedule import Action, Kind, Plan


def split_1f1b(num_ranks: int, num_microbatches: int) -> Plan:
    """1F1B's forwards with each backward as I, its W one microbatch later (so a queue holds two microbatches)."""
    rows = []
    for rank in range(num_ranks):
        warmup = min(num_microbatches, num_ranks - 1 - rank)
        row = [Action(Kind.FORWARD, rank, k) for k in range(warmup)]
        for k in range(num_microbatches):
            if warmup + k < num_microbatches:
                row.append(Action(Kind.FORWARD, rank, warmup + k))
            row.append(Action(Kind.INPUT_GRAD, rank, k))
            if k > 0:
                row.append(Action(Kind.WEIGHT_GRAD, rank, k - 1))
        rows.append((*row, Action(Kind.WEIGHT_GRAD, rank, num_microbatches - 1)))
    return Plan(
        name="split_1f1b",
        num_microbatches=num_microbatches,
        placement=tuple(range(num_ranks)),
        actions=tuple(rows),
    )


def breadth_first(placement: tuple[int, ...], num_microbatches: int) -> Plan:
    """All forwards of a stage, then of the rank's next stage; backwards from the last stage on. Any placement."""
    microbatches = range(num_microbatches)
    rows = []
    for rank in range(max(placement) + 1):
        stages = [stage for stage, holder in enumerate(placement) if holder == rank]
        forwards = [Action(Kind.FORWARD, stage, k) for stage in stages for k in microbatches]
        backwards = [Action(Kind.BACKWARD, stage, k) for stage in reversed(stages) for k in microbatches]
        rows.append((*forwards, *backwards))
    return Plan(name="breadth_first", num_microbatches=num_microbatches, placement=placement, actions=tuple(rows))
