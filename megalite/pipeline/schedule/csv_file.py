"""Plans as CSV files: to look at, to compare, and to run one of your own (`parallel.schedule=csv:FILE`).

A line for each rank, an action in each cell: `F2.0` is the forward of microbatch 0 on stage 2, and `F2.0+` one that is
meant to overlap with the rank's next backward. Everything else follows from these lines. A line that begins with
`chains` gives the number of copies of the model where there are several; empty lines and lines that begin with # are
for the reader.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from megalite.pipeline.plan import COMPUTE, Action, Kind, Plan, PlanError, check_complete, check_copies

_CELL = re.compile(r"([A-Z_]+)([0-9]{1,9})\.([0-9]{1,9})(\+?)")


def write_csv(plan: Plan, path: Path) -> None:
    """Writes a plan, lowered or not."""
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {plan.name}, {plan.num_microbatches} microbatches, placement {plan.placement}\n")
        writer = csv.writer(file, lineterminator="\n")
        if plan.num_chains > 1:
            writer.writerow(("chains", plan.num_chains))
        writer.writerows(map(plan.text_of, row) for row in plan.actions)


def read_csv(path: Path) -> Plan:
    """The plan in a file; raises PlanError, with file and line, for what cannot be read, and when it is incomplete."""
    num_chains, rows, pairs = 1, [], []
    for where, cells in _lines(path):
        if cells[0] == "chains":
            num_chains = _num_chains(cells, where)
            continue
        parsed = [_parse(cell, where) for cell in cells]
        rows.append(tuple(action for action, _ in parsed))
        pairs += [action for action, paired in parsed if paired]
        _check_pairs(parsed, where)
    holders = _holders(rows, path)
    microbatches = {action.microbatch for row in rows for action in row if action.kind is Kind.FORWARD}
    _check_numbers("stages", holders, path)
    _check_numbers("microbatches", microbatches, path)
    plan = Plan(
        name=f"csv:{path}",
        num_microbatches=len(microbatches),
        placement=tuple(holders[stage] for stage in sorted(holders)),
        actions=tuple(rows),
        num_chains=num_chains,
        pairs=frozenset(pairs),
    )
    check_complete(plan)
    return plan


def _lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(file and line, cells) of each line that says something; raises PlanError for what is no text."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # spreadsheets put a mark in front
    except OSError as error:
        raise PlanError(f"the plan {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"the plan {path} cannot be read: it is not text ({error})") from error
    for number, line in enumerate(lines, start=1):
        cells = [cell.strip() for cell in line.replace('"', "").split(",") if cell.strip()]
        if cells and not cells[0].startswith("#"):
            yield f"{path}, line {number}", cells


def _holders(rows: Sequence[Sequence[Action]], path: Path) -> dict[int, int]:
    """The rank of each stage, where its forwards are."""
    holders: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for kind, stage, _ in row:
            if kind is Kind.FORWARD and holders.setdefault(stage, rank) != rank:
                raise PlanError(f"{path}: stage {stage} has forwards on ranks {holders[stage]} and {rank}")
    return holders


def _check_numbers(what: str, numbers: Collection[int], path: Path) -> None:
    """Raises PlanError unless `numbers` are 0, 1, 2 ..."""
    found = sorted(numbers)
    if not found or found != list(range(len(found))):
        shown = f"{found}" if len(found) < 9 else f"{found[:4]} to {found[-1]}"
        raise PlanError(f"{path}: {what} {shown} have forwards; they must be numbered from 0 without gaps")


def _check_pairs(row: Sequence[tuple[Action, bool]], where: str) -> None:
    """Raises PlanError unless a backward of something else follows each forward that is meant to overlap with it."""
    work = [(action, paired) for action, paired in row if action.kind in COMPUTE]
    for (action, paired), (following, _) in pairwise([*work, (Action(Kind.FORWARD, 0, 0), False)]):
        backward = following.kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and following[1:] != action[1:]
        if paired and not backward:
            raise PlanError(f"{where}: {action}+ must be followed by a B or I of another stage or microbatch")


def _num_chains(cells: list[str], where: str) -> int:
    if len(cells) != 2 or re.fullmatch("[1-9][0-9]{0,8}", cells[1]) is None:
        raise PlanError(f"{where}: the line must be `chains` and a number, such as `chains,2`")
    return int(cells[1])


def _parse(cell: str, where: str) -> tuple[Action, bool]:
    match = _CELL.fullmatch(cell)
    if match is None or match[1] not in set(Kind) or (match[4] and match[1] != Kind.FORWARD):
        raise PlanError(f"{where}: {cell!r} is not an action such as F2.0, B2.0, I2.0 or W2.0 (stage.microbatch)")
    return Action(Kind(match[1]), int(match[2]), int(match[3])), bool(match[4])


def user_plan(path: Path, num_ranks: int, num_microbatches: int, num_chunks: int) -> Plan:
    """The plan in a file, for sizes that it must have; communication in it is left out, `lower` adds its own."""
    plan = read_csv(path)
    check_copies(plan)
    sizes = (plan.num_ranks, plan.num_microbatches, plan.num_stages)
    asked = (num_ranks, num_microbatches, num_ranks * num_chunks)
    v_shaped = num_chunks == 1 and plan.num_stages == 2 * num_ranks  # implies its two chunks, like zb_v
    if sizes != asked and not (v_shaped and sizes[:2] == asked[:2]):
        raise PlanError(
            f"{path} is a plan of {sizes[0]} ranks, {sizes[1]} microbatches and {sizes[2]} stages, not of "
            f"{asked[0]}, {asked[1]} and {asked[2]} (parallel.pp, microbatches of a step, pp * vpp)"
        )
    return Plan(
        name=plan.name,
        num_microbatches=plan.num_microbatches,
        placement=plan.placement,
        actions=tuple(plan.compute(rank) for rank in range(plan.num_ranks)),
        num_chains=plan.num_chains,
        pairs=plan.pairs,
    )
