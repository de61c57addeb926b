"""Flash attention (Dao, 2023, arXiv:2307.08691) over lists of tiles, as Triton kernels; `attention` launches them.

A program has one tile of queries (forward, gradient of q) or of keys (gradients of k and v) and walks the list of tiles
that it meets: first those that need no mask, then the others. Nothing is added by atomics, so that results never
change. Scores are in powers of 2; the log-sum-exp that leaves a kernel is natural.
"""

# The compiler takes a literal for a constexpr, and leaves out what a constexpr condition rules out.
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from .dropout import hash_elements, mix

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
BEFORE_ALL = tl.constexpr(-(2**31))
AFTER_ALL = tl.constexpr(2**31 - 1)


@triton.jit
def forward_kernel(
    q, k, v, sinks, query, start, key, row_hash, full, seen, index, out, lse,
    num_q, num_k, group, tiles_q, tiles_k, mask_b,
    q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h, out_s, out_b, out_h, lse_s, lse_b, lse_h,
    scale, softcap, rescale, threshold, head_offset,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ACC: tl.constexpr,
    CAPPED: tl.constexpr, DROPOUT: tl.constexpr, SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile of queries of one head; the last tiles, which see most keys when causal, come first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2)
    first, kv_head = tile * BLOCK_M, head // group
    rows = first + tl.arange(0, BLOCK_M)
    q_rows = _load(_at(q, batch, q_b, head, q_h), first, num_q, q_s, BLOCK_M, D, BLOCK_D, True)
    k, v = _at(k, batch, k_b, kv_head, k_h), _at(v, batch, v_b, kv_head, v_h)
    mask_row, here = batch * mask_b, rows < num_q
    last_seen = tl.load(query + mask_row * num_q + rows, mask=here, other=BEFORE_ALL)
    first_seen = tl.load(start + mask_row * num_q + rows, mask=here, other=AFTER_ALL)
    key += mask_row * num_k
    hashes = _row_hashes(row_hash + batch * num_q + rows, here, head + head_offset, DROPOUT)
    listed = mask_row * tiles_q + tile
    num_full, num_seen = tl.load(full + listed), tl.load(seen + listed)
    index += listed.to(tl.int64) * tiles_k
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=ACC)
    if SINKS:
        top = tl.zeros([BLOCK_M], dtype=ACC) + tl.load(sinks + head).to(ACC) * LOG2_E
        total = tl.zeros([BLOCK_M], dtype=ACC) + 1.0
    else:
        top = tl.zeros([BLOCK_M], dtype=ACC) + float("-inf")
        total = tl.zeros([BLOCK_M], dtype=ACC)
    acc, top, total = _forward_tiles(
        acc, top, total, q_rows, k, v, index, 0, num_full, last_seen, first_seen, key, hashes, num_k, k_s, v_s,
        scale, softcap, threshold, D, DV, BLOCK_D, BLOCK_DV, CAPPED, DROPOUT, BLOCK_N, False,
    )  # fmt: skip
    acc, top, total = _forward_tiles(
        acc, top, total, q_rows, k, v, index, num_full, num_seen, last_seen, first_seen, key, hashes, num_k, k_s, v_s,
        scale, softcap, threshold, D, DV, BLOCK_D, BLOCK_DV, CAPPED, DROPOUT, BLOCK_N, True,
    )  # fmt: skip
    # Where nothing was seen, total is 0 and top -inf: out 0 and log-sum-exp -inf.
    nothing = total == 0.0
    acc = acc * (rescale / tl.where(nothing, 1.0, total))[:, None]
    _store(_at(out, batch, out_b, head, out_h), acc, first, num_q, out_s, BLOCK_M, DV, BLOCK_DV)
    logs = (top + tl.log2(tl.where(nothing, 1.0, total))) * LN_2
    tl.store(_at(lse, batch, lse_b, head, lse_h) + rows.to(tl.int64) * lse_s, logs, mask=here)


@triton.jit
def delta_kernel(
    dout, out, delta, num_q,
    dout_s, dout_b, dout_h, out_s, out_b, out_h, delta_s, delta_b, delta_h,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout * out)."""
    first, head, batch = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    rows = first + tl.arange(0, BLOCK_M)
    dout_rows = _load(_at(dout, batch, dout_b, head, dout_h), first, num_q, dout_s, BLOCK_M, DV, BLOCK_DV, True)
    out_rows = _load(_at(out, batch, out_b, head, out_h), first, num_q, out_s, BLOCK_M, DV, BLOCK_DV, True)
    sums = tl.sum(dout_rows.to(ACC) * out_rows.to(ACC), 1)
    tl.store(_at(delta, batch, delta_b, head, delta_h) + rows.to(tl.int64) * delta_s, sums, mask=rows < num_q)


@triton.jit
def query_grad_kernel(
    q, k, v, dout, lse, delta, query, start, key, row_hash, full, seen, index, dq,
    num_q, num_k, group, tiles_q, tiles_k, mask_b,
    q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h, dout_s, dout_b, dout_h, lse_s, lse_b, lse_h,
    delta_s, delta_b, delta_h, dq_s, dq_b, dq_h,
    scale, softcap, rescale, threshold, head_offset,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ACC: tl.constexpr,
    CAPPED: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries of one head."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2)
    first, kv_head = tile * BLOCK_M, head // group
    rows = first + tl.arange(0, BLOCK_M)
    q_rows = _load(_at(q, batch, q_b, head, q_h), first, num_q, q_s, BLOCK_M, D, BLOCK_D, True)
    do_rows = _load(_at(dout, batch, dout_b, head, dout_h), first, num_q, dout_s, BLOCK_M, DV, BLOCK_DV, True)
    k, v = _at(k, batch, k_b, kv_head, k_h), _at(v, batch, v_b, kv_head, v_h)
    mask_row, here = batch * mask_b, rows < num_q
    last_seen = tl.load(query + mask_row * num_q + rows, mask=here, other=BEFORE_ALL)
    first_seen = tl.load(start + mask_row * num_q + rows, mask=here, other=AFTER_ALL)
    key += mask_row * num_k
    hashes = _row_hashes(row_hash + batch * num_q + rows, here, head + head_offset, DROPOUT)
    shift = _shift(_numbers(_at(lse, batch, lse_b, head, lse_h), first, num_q, lse_s, BLOCK_M, True))
    sums = _numbers(_at(delta, batch, delta_b, head, delta_h), first, num_q, delta_s, BLOCK_M, True)
    listed = mask_row * tiles_q + tile
    num_full, num_seen = tl.load(full + listed), tl.load(seen + listed)
    index += listed.to(tl.int64) * tiles_k
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=ACC)
    acc = _query_grad_tiles(
        acc, q_rows, do_rows, shift, sums, k, v, index, 0, num_full, last_seen, first_seen, key, hashes, num_k,
        k_s, v_s, scale, softcap, rescale, threshold, D, DV, BLOCK_D, BLOCK_DV, CAPPED, DROPOUT, BLOCK_N, False,
    )  # fmt: skip
    acc = _query_grad_tiles(
        acc, q_rows, do_rows, shift, sums, k, v, index, num_full, num_seen, last_seen, first_seen, key, hashes, num_k,
        k_s, v_s, scale, softcap, rescale, threshold, D, DV, BLOCK_D, BLOCK_DV, CAPPED, DROPOUT, BLOCK_N, True,
    )  # fmt: skip
    _store(_at(dq, batch, dq_b, head, dq_h), acc * scale, first, num_q, dq_s, BLOCK_M, D, BLOCK_D)


@triton.jit
def key_grads_kernel(
    q, k, v, dout, lse, delta, query, start, key, row_hash, full, seen, index, dk, dv,
    num_q, num_k, group, tiles_q, tiles_k, mask_b,
    q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h, dout_s, dout_b, dout_h, lse_s, lse_b, lse_h,
    delta_s, delta_b, delta_h, dk_s, dk_b, dk_h, dv_s, dv_b, dv_h,
    scale, softcap, rescale, threshold, head_offset,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ACC: tl.constexpr,
    CAPPED: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of one key head, summed over the query heads of its group in order."""
    tile, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, head = tile * BLOCK_N, kv_head * group
    columns = first + tl.arange(0, BLOCK_N)
    k_rows = _load(_at(k, batch, k_b, kv_head, k_h), first, num_k, k_s, BLOCK_N, D, BLOCK_D, True)
    v_rows = _load(_at(v, batch, v_b, kv_head, v_h), first, num_k, v_s, BLOCK_N, DV, BLOCK_DV, True)
    q, dout = _at(q, batch, q_b, head, q_h), _at(dout, batch, dout_b, head, dout_h)
    lse, delta = _at(lse, batch, lse_b, head, lse_h), _at(delta, batch, delta_b, head, delta_h)
    mask_row = batch * mask_b
    # A place after all others is seen by no query.
    places = tl.load(key + mask_row * num_k + columns, mask=columns < num_k, other=AFTER_ALL)
    query += mask_row * num_q
    start += mask_row * num_q
    row_hash += batch * num_q
    listed = mask_row * tiles_k + tile
    num_full, num_seen = tl.load(full + listed), tl.load(seen + listed)
    index += listed.to(tl.int64) * tiles_q
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], dtype=ACC)
    acc_v = tl.zeros([BLOCK_N, BLOCK_DV], dtype=ACC)
    acc_k, acc_v = _key_grads_tiles(
        acc_k, acc_v, k_rows, v_rows, q, dout, lse, delta, index, num_full, group, places, query, start, row_hash,
        head + head_offset, num_q, q_s, q_h, dout_s, dout_h, lse_s, lse_h, delta_s, delta_h, scale, softcap, rescale,
        threshold, D, DV, BLOCK_D, BLOCK_DV, CAPPED, DROPOUT, BLOCK_M, False,
    )  # fmt: skip
    acc_k, acc_v = _key_grads_tiles(
        acc_k, acc_v, k_rows, v_rows, q, dout, lse, delta, index + num_full, num_seen - num_full, group, places, query,
        start, row_hash, head + head_offset, num_q, q_s, q_h, dout_s, dout_h, lse_s, lse_h, delta_s, delta_h, scale,
        softcap, rescale, threshold, D, DV, BLOCK_D, BLOCK_DV, CAPPED, DROPOUT, BLOCK_M, True,
    )  # fmt: skip
    _store(_at(dk, batch, dk_b, kv_head, dk_h), acc_k * scale, first, num_k, dk_s, BLOCK_N, D, BLOCK_D)
    _store(_at(dv, batch, dv_b, kv_head, dv_h), acc_v * rescale, first, num_k, dv_s, BLOCK_N, DV, BLOCK_DV)


@triton.jit
def _forward_tiles(
    acc, top, total, q, k, v, index, begin, end, last_seen, first_seen, key, hashes, num_k, k_s, v_s,
    scale, softcap, threshold,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAPPED: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Softmax over the tiles begin .. end - 1 of a list, the sums so far being scaled to the largest score so far."""
    for i in range(begin, end):
        first = tl.load(index + i) * BLOCK_N
        k_rows = _load(k, first, num_k, k_s, BLOCK_N, D, BLOCK_D, MASKED)
        scores = tl.dot(q, tl.trans(k_rows), input_precision="ieee")
        scores, factor = _capped(scores, scale, softcap, CAPPED)
        places = _places(key, first, num_k, BLOCK_N, MASKED, DROPOUT)
        if MASKED:
            seen = (places[None, :] >= first_seen[:, None]) & (places[None, :] <= last_seen[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        probs = tl.exp2(scores * factor - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(probs, 1)
        if DROPOUT:
            probs = tl.where(hash_elements(hashes[:, None], places[None, :]) >= threshold, probs, 0.0)
        v_rows = _load(v, first, num_k, v_s, BLOCK_N, DV, BLOCK_DV, MASKED)
        acc = tl.dot(probs.to(v_rows.dtype), v_rows, acc * fade[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def _query_grad_tiles(
    acc, q, dout, shift, delta, k, v, index, begin, end, last_seen, first_seen, key, hashes, num_k, k_s, v_s,
    scale, softcap, rescale, threshold,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAPPED: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds dscores k of the tiles begin .. end - 1 of a list."""
    for i in range(begin, end):
        first = tl.load(index + i) * BLOCK_N
        k_rows = _load(k, first, num_k, k_s, BLOCK_N, D, BLOCK_D, MASKED)
        v_rows = _load(v, first, num_k, v_s, BLOCK_N, DV, BLOCK_DV, MASKED)
        scores = tl.dot(q, tl.trans(k_rows), input_precision="ieee")
        scores, factor = _capped(scores, scale, softcap, CAPPED)
        places = _places(key, first, num_k, BLOCK_N, MASKED, DROPOUT)
        probs = tl.exp2(scores * factor - shift[:, None])
        if MASKED:
            seen = (places[None, :] >= first_seen[:, None]) & (places[None, :] <= last_seen[:, None])
            probs = tl.where(seen, probs, 0.0)
        dprobs = tl.dot(dout, tl.trans(v_rows), input_precision="ieee")
        if DROPOUT:
            dprobs = tl.where(hash_elements(hashes[:, None], places[None, :]) >= threshold, dprobs * rescale, 0.0)
        dscores = probs * (dprobs - delta[:, None])
        if CAPPED:
            dscores = dscores * (1.0 - scores * scores)
        acc = tl.dot(dscores.to(k_rows.dtype), k_rows, acc, input_precision="ieee")
    return acc


@triton.jit
def _key_grads_tiles(
    acc_k, acc_v, k, v, q, dout, lse, delta, index, length, group, places, query, start, row_hash, head, num_q,
    q_s, q_h, dout_s, dout_h, lse_s, lse_h, delta_s, delta_h,
    scale, softcap, rescale, threshold,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAPPED: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds dscores^T q and probs^T dout (not rescaled) of `length` tiles of queries for each head of the group."""
    for i in range(0, group * length):
        of_group = i // length
        first = tl.load(index + i % length) * BLOCK_M
        rows = first + tl.arange(0, BLOCK_M)
        here = rows < num_q
        q_rows = _load(q + of_group.to(tl.int64) * q_h, first, num_q, q_s, BLOCK_M, D, BLOCK_D, MASKED)
        do_rows = _load(dout + of_group.to(tl.int64) * dout_h, first, num_q, dout_s, BLOCK_M, DV, BLOCK_DV, MASKED)
        shift = _shift(_numbers(lse + of_group.to(tl.int64) * lse_h, first, num_q, lse_s, BLOCK_M, MASKED))
        sums = _numbers(delta + of_group.to(tl.int64) * delta_h, first, num_q, delta_s, BLOCK_M, MASKED)
        scores = tl.dot(k, tl.trans(q_rows), input_precision="ieee")
        scores, factor = _capped(scores, scale, softcap, CAPPED)
        probs = tl.exp2(scores * factor - shift[None, :])
        if MASKED:
            last_seen = tl.load(query + rows, mask=here, other=BEFORE_ALL)
            first_seen = tl.load(start + rows, mask=here, other=AFTER_ALL)
            seen = (places[:, None] >= first_seen[None, :]) & (places[:, None] <= last_seen[None, :])
            probs = tl.where(seen, probs, 0.0)
        # The product for dv before that for dprobs: fewer registers are alive at once.
        if DROPOUT:
            hashes = _row_hashes(row_hash + rows, here, head + of_group, DROPOUT)
            kept = hash_elements(hashes[None, :], places[:, None]) >= threshold
            dropped = tl.where(kept, probs, 0.0)
        else:
            dropped = probs
        acc_v = tl.dot(dropped.to(do_rows.dtype), do_rows, acc_v, input_precision="ieee")
        dprobs = tl.dot(v, tl.trans(do_rows), input_precision="ieee")
        if DROPOUT:
            dprobs = tl.where(kept, dprobs * rescale, 0.0)
        dscores = probs * (dprobs - sums[None, :])
        if CAPPED:
            dscores = dscores * (1.0 - scores * scores)
        acc_k = tl.dot(dscores.to(q_rows.dtype), q_rows, acc_k, input_precision="ieee")
    return acc_k, acc_v


@triton.jit
def _capped(products, scale, softcap, CAPPED: tl.constexpr):
    """(x, f): f * x are the scores in powers of 2; with a softcap, x = tanh(products * scale / softcap)."""
    if CAPPED:
        x = 1.0 - 2.0 / (1.0 + tl.exp2(products * (2.0 * LOG2_E * scale / softcap)))
        factor = softcap * LOG2_E
    else:
        x = products
        factor = scale * LOG2_E
    return x, factor


@triton.jit
def _numbers(x, first, count, step, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """[ROWS]: the numbers first .. of x, `step` apart, with zeros beyond number `count` (MASKED)."""
    at = x + first.to(tl.int64) * step + tl.arange(0, ROWS) * step
    return tl.load(at, mask=first + tl.arange(0, ROWS) < count, other=0.0) if MASKED else tl.load(at)


@triton.jit
def _shift(lse):
    """Log-sum-exps in powers of 2; 0 where nothing is seen, as all probabilities are 0 there."""
    return tl.where(lse == float("-inf"), 0.0, lse * LOG2_E)


@triton.jit
def _places(key, first, num_k, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, NEEDED: tl.constexpr):
    """Places of a tile of keys, where somebody asks; beyond the last key, one that nobody sees."""
    columns = first + tl.arange(0, BLOCK_N)
    if MASKED:
        places = tl.load(key + columns, mask=columns < num_k, other=AFTER_ALL)
    elif NEEDED:
        places = tl.load(key + columns)
    else:
        places = columns
    return places


@triton.jit
def _row_hashes(row_hash, here, head, DROPOUT: tl.constexpr):
    """The hashes of a head's queries; see `attention_rows.keep_mask`."""
    if DROPOUT:
        hashes = tl.load(row_hash, mask=here, other=0).to(tl.uint32, bitcast=True)
        hashes = mix(hashes + head.to(tl.uint32) * 0x85EBCA77)
    else:
        hashes = here.to(tl.uint32)  # not read
    return hashes


@triton.jit
def _at(x, batch, x_b, head, x_h):
    """Where a head of a batch row begins."""
    return x + batch.to(tl.int64) * x_b + head.to(tl.int64) * x_h


@triton.jit
def _load(
    x, first, count, step, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """[ROWS, BLOCK_D]: rows first .. of x, `step` apart, with zeros beyond row `count` (MASKED) and column D."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    at = x + first.to(tl.int64) * step + (rows[:, None] * step + columns[None, :])
    if MASKED and D != BLOCK_D:
        values = tl.load(at, mask=(first + rows < count)[:, None] & (columns < D)[None, :], other=0.0)
    elif MASKED:
        values = tl.load(at, mask=(first + rows < count)[:, None], other=0.0)
    elif D != BLOCK_D:
        values = tl.load(at, mask=(columns < D)[None, :], other=0.0)
    else:
        values = tl.load(at)
    return values


@triton.jit
def _store(
    x, values, first, count, step, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The inverse of `_load`, in x's dtype."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    at = x + first.to(tl.int64) * step + (rows[:, None] * step + columns[None, :])
    here = (first + rows < count)[:, None] & (columns < D)[None, :]
    tl.store(at, values.to(x.dtype.element_ty), mask=here)
