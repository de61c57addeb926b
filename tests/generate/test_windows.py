"""Windows over long rows: every token is scored once, after as much context as there is."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.generate.windows import Window, micro_batch, of_similar_length, windows


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_every_token_is_scored_once(length: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    tokens = np.arange(length)
    found = list(windows(tokens, context, stride))
    scored = [int(token) for window in found for token in window.tokens[-window.num_scored :]]
    assert scored == list(range(1, length))
    for window in found:
        assert len(window) <= context and np.array_equal(np.diff(window.tokens), np.ones(len(window)))
    for window in found[1:]:  # as much context as there is
        assert len(window) == min(context, int(window.tokens[-1]))


def test_windows_as_the_harness_documents_them() -> None:
    tokens = np.array([-1, *range(10)])
    found = [(w.tokens[:-1].tolist(), w.tokens[-w.num_scored :].tolist()) for w in windows(tokens, 4, 4)]
    assert found == [([-1, 0, 1, 2], [0, 1, 2, 3]), ([3, 4, 5, 6], [4, 5, 6, 7]), ([5, 6, 7, 8], [8, 9])]


def test_a_batch_is_padded_on_the_right() -> None:
    batch = micro_batch([Window(np.array([5, 6, 7, 8]), 2), Window(np.array([1, 2]), 1)])
    assert batch.tokens.tolist() == [[5, 1], [6, 0], [7, 0]] and batch.labels.tolist() == [[6, 2], [7, 0], [8, 0]]
    assert batch.loss_mask.tolist() == [[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    assert batch.token_mask is not None and batch.token_mask.tolist() == [[True, True], [True, False], [True, False]]
    empty = micro_batch([])
    assert empty.tokens.shape == (1, 1) and not empty.loss_mask.any()


@pytest.mark.parametrize("count", [0, 1, 7, 40])
def test_batches_hold_all_windows(count: int) -> None:
    lengths = torch.randint(1, 30, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = list(of_similar_length((Window(np.zeros(n + 1), 1) for n in lengths), 3, look_ahead=4))
    assert sorted(len(w) for batch in batches for w in batch) == sorted(lengths)
    assert all(len(batch) <= 3 for batch in batches)
