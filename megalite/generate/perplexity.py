"""How well a model predicts texts: the mean loss of their tokens, perplexity, and bits per byte; on any layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.data.indexed import IndexedDataset
from megalite.generate.windows import micro_batch, of_similar_length, windows
from megalite.generate.words import Words
from megalite.models.transformer import Transformer
from megalite.mpu import ParallelConfig, ParallelState
from megalite.pipeline.executor import Executor
from megalite.train.build import plan_of

Report = Callable[[int], None]
"""Told how many more tokens are scored."""


@dataclass(frozen=True)
class Document:
    """tokens: int64, the first of which is given and the others are scored. num_bytes: of their text in UTF-8."""

    tokens: NDArray[np.int64]
    num_bytes: int | None

    @property
    def num_scored(self) -> int:
        """Tokens that are predicted."""
        return max(0, len(self.tokens) - 1)


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The result: sums over all documents."""

    documents: int
    tokens: int
    """Scored tokens."""
    bytes: int | None
    """Of the text, if it is known."""
    nats: float
    """The sum of the tokens' losses."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is too large for a number."""
        return math.exp(self.loss) if self.loss < 709.0 else math.inf

    @cached_property
    def bits_per_byte(self) -> float | None:
        """What does not depend on the tokenizer."""
        return self.nats / math.log(2.0) / self.bytes if self.bytes else None


def text_documents(path: str | Path, words: Words, key: str = "text") -> list[Document]:
    """A file as one document, or of a .jsonl file each line's field `key`; each after what comes before a text."""
    content = Path(path).read_text(encoding="utf-8")
    texts = [content]
    if str(path).endswith(".jsonl"):
        try:
            texts = [str(json.loads(line)[key]) for line in content.split("\n") if line.strip()]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: every line should be an object with a field {key!r} ({error})") from error
    encoded = ((text, words.document(text)) for text in texts if text)
    return [Document(np.array(ids, dtype=np.int64), len(text.encode())) for text, ids in encoded]


def indexed_documents(prefix: str | Path, words: Words | None, num_documents: int | None = None) -> list[Document]:
    """The documents of a token file, each after an end of document (without words: its first token is given)."""
    dataset, found = IndexedDataset(prefix), list[Document]()
    for begin, end in islice(pairwise(dataset.document_index.tolist()), num_documents):
        parts = [np.asarray(dataset[i], dtype=np.int64) for i in range(begin, end)]
        tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        num_bytes = None
        if words is not None:
            num_bytes = len(words.tokenizer.decode(tokens.tolist()).encode())
            tokens = np.concatenate(([words.tokenizer.eod], tokens))
        if len(tokens) > 1:
            found.append(Document(tokens, num_bytes))
    return found


def evaluation_layout(parallel: ParallelConfig) -> ParallelConfig:
    """`parallel` without what only training has: schedules and ZeRO."""
    return replace(
        parallel, schedule="1f1b", vpp=1, group_size=None, zero=0, zero_shard_size=None, zero_persistent=0
    )  # fmt: skip


def evaluate(
    documents: Sequence[Document],
    stage: Transformer,
    mpu: ParallelState,
    device: torch.device,
    *,
    context: int,
    stride: int,
    batch_size: int,
    report: Report = lambda count: None,
) -> Perplexity:
    """The loss of every token of `documents` but the first of each; every rank calls it with the same ones.

    context: the most tokens that the model sees; stride: see `windows`. Data-parallel ranks take turns with batches of
    `batch_size` windows; pipeline stages work on several at a time.
    """
    executor = Executor(plan_of(mpu.config, mpu.pp.size), {mpu.pp.rank: stage}, {}, mpu, device)
    rows = (window for document in documents for window in windows(document.tokens, context, stride))
    batches = of_similar_length(rows, batch_size)
    at_once, total = (2 * mpu.pp.size if mpu.pp.size > 1 else 1) * mpu.dp.size, 0.0
    while group := list(islice(batches, at_once)):
        num_scored = sum(window.num_scored for batch in group for window in batch)
        # Every data-parallel rank runs as many: experts may be spread over them.
        group += [[]] * (-len(group) % mpu.dp.size)
        total += float(executor.evaluate([micro_batch(batch) for batch in group[mpu.dp.rank :: mpu.dp.size]]))
        report(num_scored)
    everywhere = torch.tensor([total], dtype=torch.float64, device=mpu.world.device)
    nats = float(mpu.pp.all_reduce(mpu.dp_cp.all_reduce(everywhere)))
    sizes = [document.num_bytes for document in documents]
    return Perplexity(
        documents=len(documents),
        tokens=sum(document.num_scored for document in documents),
        bytes=sum(size for size in sizes if size is not None) if None not in sizes else None,
        nats=nats,
    )
