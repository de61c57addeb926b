"""Interval masks: how they are cut into blocks and pieces, and what they leave out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.kernels.attention_mask import AttentionMask, Piece, first_seen, num_pairs
from tests.kernels.masked import (
    MASKS,
    allowed,
    part,
    rows,
    zigzag,
)

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("name", MASKS)
def test_counts(name: str) -> None:
    mask = MASKS[name]()
    count = num_pairs(mask)
    assert count.allowed == int(allowed(mask).sum())
    assert count.computed >= count.allowed
    assert mask.is_empty == (count.allowed == 0)


def test_what_is_empty_is_not_computed() -> None:
    """Blocks of 16 queries: at most 15 idle keys a side for each block, and a zigzag's gap ends a block."""
    for mask in (rows(), rows(window=9), part(rows([(101,)]), zigzag(101, 1), zigzag(101, 1))):
        count = num_pairs(mask)
        assert count.computed <= count.allowed + 2 * 16 * mask.query.numel()
    assert num_pairs(part(rows([(96,)]), zigzag(96, 0), zigzag(96, 2))) == (16 * 32, 16 * 32)


def test_a_jump_of_the_keys_ends_a_block() -> None:
    """Places 24 .. 47 and 96 .. 119 on the whole row: blocks of 16, 8, 16 and 8 queries."""
    mask = part(rows([(144,)]), zigzag(144, 1), torch.arange(144))
    assert num_pairs(mask).computed == 16 * 40 + 8 * 48 + 16 * 112 + 8 * 120


def test_what_all_queries_see_is_not_compared() -> None:
    (columns,) = rows([(64,)], window=40).columns
    full = [(tile.full[1] - tile.full[0], block.queries[0]) for block in columns.blocks for tile in block.tiles]
    assert sum(length for length, begin in full if begin == 16) == 17
    assert sum(length for length, begin in full if begin == 48) == 49 - 24


def test_a_window_counts_the_token_itself() -> None:
    places = torch.arange(6)[:, None]
    assert first_seen(places, None, 3).flatten().tolist() == [0, 0, 0, 1, 2, 3]
    assert first_seen(places, torch.tensor([0, 0, 0, 0, 4, 4])[:, None], 3).flatten().tolist() == [0, 0, 0, 1, 4, 4]


def dense(pieces: tuple[Piece, ...], mask: AttentionMask) -> Tensor:
    """How often the pieces let each query see each key: int [b, sq, sk], by their definition."""
    (sq, b), sk = mask.query.shape, mask.key.shape[0]
    seen = torch.zeros(b, sq, sk, dtype=torch.int64)
    for piece in pieces:
        queries, keys = (torch.arange(stop - start) for start, stop in (piece.queries, piece.keys))
        i, j = queries[:, None], keys[None]
        ahead = len(keys) - len(queries)
        shapes = {"full": i + j >= 0, "causal": j <= i + ahead, "band": (j >= i) & (j <= i + ahead), "fade": j >= i}
        assert shapes[piece.shape].any(1).all()
        seen[piece.batch, slice(*piece.queries), slice(*piece.keys)] += shapes[piece.shape].expand(len(queries), -1)
    return seen


@pytest.mark.parametrize("name", MASKS)
def test_pieces_are_the_mask(name: str) -> None:
    mask = MASKS[name]()
    assert dense(mask.pieces, mask).equal(allowed(mask).squeeze(1).long())


def test_documents_are_a_piece_each() -> None:
    mask = rows([(1, 2, 7, 64)])
    assert [piece.queries for piece in mask.pieces] == [(0, 1), (1, 3), (3, 10), (10, 74)]
    assert all(piece.queries == piece.keys for piece in mask.pieces)
