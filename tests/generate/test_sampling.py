"""The choice of the next token."""

import pytest
import torch
from torch import Tensor

from megalite.generate.sampling import Sampling, choose, uniform

ALL = Sampling(temperature=1.0, top_k=0)


def sampled(logits: Tensor, sampling: Sampling, draws: int = 4000) -> Tensor:
    """The share of each token among the choices of that many rows with the same logits."""
    many = logits.expand(draws, -1)
    chosen = choose(many, sampling, range(draws), [7] * draws)
    return torch.bincount(chosen, minlength=logits.shape[-1]) / draws


def test_choices_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -30.0])
    probs = logits.softmax(0)
    torch.testing.assert_close(sampled(logits, ALL), probs, rtol=0, atol=0.03)
    torch.testing.assert_close(
        sampled(logits, Sampling(temperature=0.5, top_k=0)), (2 * logits).softmax(0), rtol=0, atol=0.03
    )
    two = torch.tensor([0.0, 0.7311, 0.2689, 0.0])
    torch.testing.assert_close(sampled(logits, Sampling(temperature=1.0, top_k=2)), two, rtol=0, atol=0.03)
    # 0.665 alone is less than 0.7: the second likeliest is taken, too; the third would be too much.
    torch.testing.assert_close(sampled(logits, Sampling(temperature=1.0, top_k=0, top_p=0.7)), two, rtol=0, atol=0.03)
    torch.testing.assert_close(sampled(logits, Sampling(temperature=1.0, top_k=0, min_p=0.3)), two, rtol=0, atol=0.03)
    assert sampled(logits, Sampling(temperature=1.0, top_k=0, top_p=0.1))[1] == 1.0
    assert sampled(logits, Sampling(temperature=1.0, top_k=9))[0] > 0


def test_top_k_keeps_ids() -> None:
    logits = torch.tensor([[-9.0, 3.0, -9.0, 2.0, -9.0, 4.0]])
    found = {int(choose(logits, Sampling(temperature=1.0, top_k=3), [row], [0])) for row in range(100)}
    assert found == {1, 3, 5}


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert choose(logits, Sampling(temperature=0.0), [0, 1], [0, 0]).tolist() == [1, 0]


def test_a_choice_depends_on_seed_row_and_position_alone() -> None:
    logits = torch.zeros(6, 50, dtype=torch.float64)
    rows, positions = [3, 4, 5, 6, 7, 8], [10, 11, 12, 10, 11, 12]
    together = choose(logits, ALL, rows, positions).tolist()
    alone = [int(choose(logits[:1], ALL, [row], [place])) for row, place in zip(rows, positions, strict=True)]
    assert together == alone and len(set(together)) > 2
    assert together != choose(logits, Sampling(temperature=1.0, top_k=0, seed=1), rows, positions).tolist()
    assert len({uniform(seed, row, place) for seed in (0, 1) for row in (0, 1) for place in (0, 1)}) == 8


def test_repetition_is_punished() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.2]])
    seen = torch.tensor([[True, False, True, False]])
    greedy = Sampling(temperature=0.0, repetition_penalty=2.0)
    assert int(choose(logits, greedy, [0], [0], seen)) == 1
    assert int(choose(logits[:, 2:], greedy, [0], [0], seen[:, 2:])) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "--temperature=-1.0 must be at least 0"),
        ({"top_k": -1}, "--top-k=-1 must be at least 0"),
        ({"top_p": 0.0}, "--top-p=0.0 must be above 0"),
        ({"min_p": 2.0}, "--min-p=2.0 must be from 0"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty=0.0 must be above 0"),
    ],
)
def test_what_cannot_be_sampled_is_refused(changes: dict[str, float], message: str) -> None:
    (problem,) = Sampling(**changes).problems()  # pyright: ignore[reportArgumentType]
    assert problem.startswith(message)
