"""Every layer on exactly one stage, no stage without parameters, and no better split."""

from itertools import combinations_with_replacement, pairwise

import pytest

from megalite.pipeline.partition import partition


def _check(split: list[range], num_layers: int, num_stages: int) -> None:
    assert len(split) == num_stages
    assert [layer for layers in split for layer in layers] == list(range(num_layers))
    assert all(len(layers) > 0 for layers in split[1:-1])


def _stage_costs(split: list[range], costs: list[float], embedding_cost: float, head_cost: float) -> list[float]:
    stages = [sum(costs[i] for i in layers) for layers in split]
    stages[0] += embedding_cost
    stages[-1] += head_cost
    return stages


def _best_by_search(costs: list[float], num_stages: int, embedding_cost: float, head_cost: float) -> float:
    best = float("inf")
    for cuts in combinations_with_replacement(range(len(costs) + 1), num_stages - 1):
        ends = [0, *cuts, len(costs)]
        split = [range(a, b) for a, b in pairwise(ends)]
        if all(len(layers) > 0 for layers in split[1:-1]):
            best = min(best, max(_stage_costs(split, costs, embedding_cost, head_cost)))
    return best


@pytest.mark.parametrize("num_stages", range(1, 33))
def test_every_layer_once_in_order(num_stages: int) -> None:
    for num_layers in range(max(num_stages - 2, 0), 41):
        head_cost = (0.0, 1.5, 100.0)[(num_layers + num_stages) % 3]
        split = partition(num_layers, num_stages, layer_cost=1.0, embedding_cost=0.1, head_cost=head_cost)
        _check(split, num_layers, num_stages)


@pytest.mark.parametrize("num_stages", range(1, 6))
def test_no_split_has_a_faster_slowest_stage(num_stages: int) -> None:
    for num_layers in range(max(num_stages - 2, 0), 8):
        for embedding_cost, head_cost in ((0, 0), (1, 3), (0.5, 9), (7, 0)):
            costs = [1.0 + (5 * i % 3) for i in range(num_layers)]
            split = partition(
                num_layers, num_stages, layer_cost=costs, embedding_cost=embedding_cost, head_cost=head_cost
            )
            _check(split, num_layers, num_stages)
            slowest = max(_stage_costs(split, costs, embedding_cost, head_cost))
            assert slowest == _best_by_search(costs, num_stages, embedding_cost, head_cost)


def test_even_costs_split_evenly() -> None:
    split = partition(30, 4, layer_cost=1.0, embedding_cost=0.0, head_cost=0.0)
    assert sorted(map(len, split)) == [7, 7, 8, 8]
    split = partition(80, 32, layer_cost=1.0, embedding_cost=0.0, head_cost=0.0)
    assert sorted(map(len, split)) == [2] * 16 + [3] * 16


def test_head_takes_the_place_of_layers() -> None:
    split = partition(10, 2, layer_cost=1.0, embedding_cost=0.0, head_cost=4.0)
    assert list(map(len, split)) == [7, 3]


@pytest.mark.parametrize("num_layers", range(2, 9))
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_large_vocabulary_leaves_no_stage_without_parameters(num_layers: int, num_stages: int) -> None:
    for embedding_cost in (0.0, 800_000.0):
        split = partition(num_layers, num_stages, layer_cost=3_000.0, embedding_cost=embedding_cost, head_cost=800_000)
        _check(split, num_layers, num_stages)


def test_ends_are_empty_only_when_that_is_faster() -> None:
    assert list(map(len, partition(4, 2, layer_cost=1.0, embedding_cost=0.0, head_cost=9.0))) == [4, 0]
    assert list(map(len, partition(2, 2, layer_cost=1.0, embedding_cost=0.0, head_cost=1.0))) == [1, 1]
    assert list(map(len, partition(2, 4, layer_cost=1.0, embedding_cost=0.0, head_cost=0.0))) == [0, 1, 1, 0]
    # An empty last stage would be more even, but the slowest stage stays at 10.
    assert list(map(len, partition(3, 3, layer_cost=[10, 1, 1], embedding_cost=0.0, head_cost=5.0))) == [1, 1, 1]


def test_explicit_split() -> None:
    split = partition(12, 2, layer_cost=1.0, embedding_cost=0.0, head_cost=0.0, layers_per_stage=[5, 7])
    assert split == [range(0, 5), range(5, 12)]
    split = partition(3, 3, layer_cost=1.0, embedding_cost=0.0, head_cost=0.0, layers_per_stage=[0, 3, 0])
    assert split == [range(0, 0), range(0, 3), range(3, 3)]


@pytest.mark.parametrize(
    ("counts", "reasons"),
    [
        ([5, 6], ["adds up to 11", "num_layers=12"]),
        ([4, 4, 4], ["3 entries", "2 stages"]),
        ([13, -1], ["-1 layers on stage 1"]),
        ([4, 4, 3], ["3 entries", "adds up to 11"]),
    ],
)
def test_bad_explicit_split_names_every_number(counts: list[int], reasons: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        partition(12, 2, layer_cost=1.0, embedding_cost=0.0, head_cost=0.0, layers_per_stage=counts)
    for reason in reasons:
        assert reason in str(error.value)


def test_explicit_split_may_not_empty_a_middle_stage() -> None:
    with pytest.raises(ValueError, match="leaves stage 1 without parameters"):
        partition(12, 3, layer_cost=1.0, embedding_cost=0.0, head_cost=0.0, layers_per_stage=[6, 0, 6])


def test_absurd_costs() -> None:
    """Neither their squares nor their sums leave what floats can hold; what is not a cost is refused."""
    for unit in (1e-320, 1e-200, 1e200, 1e308):
        split = partition(6, 3, layer_cost=unit, embedding_cost=0.0, head_cost=unit)
        assert list(map(len, split)) == [2, 2, 2] or list(map(len, split)) == [3, 2, 1]
    _check(partition(6, 3, layer_cost=0.0, embedding_cost=0.0, head_cost=0.0), 6, 3)
    for cost in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="costs must be finite and not negative"):
            partition(6, 3, layer_cost=1.0, embedding_cost=cost, head_cost=0.0)
        with pytest.raises(ValueError, match="costs must be finite and not negative"):
            partition(2, 2, layer_cost=[1.0, cost], embedding_cost=0.0, head_cost=0.0)


def test_too_few_layers_names_the_limit() -> None:
    with pytest.raises(ValueError, match=r"num_layers=2 is too few for 8 .* at most 4 stages"):
        partition(2, 8, layer_cost=1.0, embedding_cost=0.0, head_cost=0.0)
