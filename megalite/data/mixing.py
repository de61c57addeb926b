"""From token files and a blend to the datasets of a run: as many samples of each as the blend draws."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.blended import SURPLUS, BlendedDataset, BlendPhase, blend_targets, cached_order, normalise_weights
from megalite.data.chained import ChainedDataset
from megalite.data.config import DataConfig
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.gpt_index import split_ranges
from megalite.data.indexed import IndexedDataset
from megalite.data.packed_dataset import PackedDataset
from megalite.data.rows import DocumentRules, SampleSource

_NEXT_ORDER = 0x9E3779B1  # added to the seed for epochs that are appended: odd, so that no two in reach are alike
_PARTS = ("train", "validation")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Token files that a run reads."""

    name: str
    """As the config has it: tokenised text lies elsewhere."""
    data: IndexedDataset
    eod: int | None
    checked_vocab: int | None
    """The vocabulary that each row read is checked against; what a side file says may be out of date."""
    record: dict[str, Any]
    """What identifies its tokens, where that is recorded."""

    def __str__(self) -> str:
        data = self.data
        return f"{self.name}: {len(data)} sequences, {data.num_tokens} tokens ({data.dtype.name})"


@dataclass(frozen=True, kw_only=True)
class DatasetBuilder:
    """Builds the datasets of one part of the split from `sources`.

    phases: (first sample, weights of all sources); none: by their tokens. The dataset of a source is built for the
    samples that the first weights draw from it in a run of the first length; where more are drawn, because weights
    change or the run goes on longer, epochs of other orders are appended. So a sample never moves: whatever is added
    later, what has been consumed stays the beginning of the order.
    """

    config: DataConfig
    sources: Sequence[Source]
    seed: int
    index_dir: Path
    phases: Sequence[BlendPhase] = ()
    split: str = ""
    """Instead of data.split."""
    reports: dict[str, list[str]] = field(default_factory=dict)
    """What the datasets of each part say of their rows, and what is drawn from each source."""

    def train(self, orders: Sequence[int]) -> SampleSource:
        """Samples for the largest of `orders`, in the order that a run of the first of them begins; none: each once."""
        used, phases = self._used(0)
        if not used:
            used, phases = [0], []  # every path is empty: let its dataset say so
        if not orders and self.phases and len(used) > 1:
            raise ValueError("data.blend needs a number of samples: give data.num_samples or train.num_steps")
        return self._mixed(0, used, phases, orders)

    def validation(self, num_samples: int) -> SampleSource | None:
        """Samples of the part after training, by the first weights; None, with a warning, when there is none."""
        used, phases = self._used(1)
        if not used:
            log.warning(
                "data.split=%r leaves no validation documents (of %s); there will be no validation",
                self._split, ", ".join(str(len(source.data)) for source in self.sources),
            )  # fmt: skip
            return None
        return self._mixed(1, used, phases[:1], [num_samples])

    def each_validation(self, num_samples: int) -> dict[str, SampleSource]:
        """The validation samples of each source alone, by its name."""
        used, _ = self._used(1)
        return {self.sources[i].name: self._grown(1, i, num_samples, num_samples) for i in used}

    @property
    def _split(self) -> str:
        return self.split or self.config.split

    def _range(self, part: int, i: int) -> tuple[int, int]:
        return split_ranges(self._split, len(self.sources[i].data))[part] or (0, 0)

    def _tokens(self, part: int, i: int) -> int:
        first, last = self._range(part, i)
        return int(self.sources[i].data.lengths[first:last].sum(dtype=np.int64))

    def _used(self, part: int) -> tuple[list[int], list[tuple[int, list[float]]]]:
        """(Sources with a share, (first sample, their weights) of each phase)."""
        tokens = [self._tokens(part, i) for i in range(len(self.sources))]
        phases = [(first, list(weights)) for first, weights in self.phases] or [(0, [float(n) for n in tokens])]
        if part:  # an empty training part is an error
            phases = [
                (first, [w if n else 0.0 for w, n in zip(weights, tokens, strict=True)])
                for first, weights in phases[:1]
            ]
        used = [i for i in range(len(tokens)) if any(weights[i] > 0 for _, weights in phases)]
        for i in sorted(set(range(len(tokens))) - set(used)):
            log.warning("%s has no share in %s and is left out", self.sources[i].name, _PARTS[part])
        return used, [(first, [weights[i] for i in used]) for first, weights in phases]

    def _mixed(
        self, part: int, used: list[int], phases: list[tuple[int, list[float]]], orders: Sequence[int]
    ) -> SampleSource:
        first, needed = (orders[0], max(orders)) if orders else (None, None)
        if len(used) == 1 and needed is not None:
            self._report(part, used, [needed])
        if len(used) == 1:
            return self._grown(part, used[0], first, needed)
        if first is None or needed is None:
            datasets = [self._grown(part, i, None, None) for i in used]
            self._report(part, used, [len(dataset) for dataset in datasets])
            return BlendedDataset(datasets)
        shares = phases[0][1]
        size = sum(blend_targets(shares, needed))
        phases = [(start, normalise_weights(weights)) for start, weights in phases]
        order, _ = cached_order(phases, size, self.index_dir)
        counts = np.bincount(order, minlength=len(used)).tolist()
        requests = blend_targets(shares, first, SURPLUS)
        parts = [self._grown(part, i, n, c) for i, n, c in zip(used, requests, counts, strict=True)]
        self._report(part, used, np.bincount(order[:needed], minlength=len(used)).tolist())
        return BlendedDataset(parts, shares, size, changes=phases[1:], cache_dir=self.index_dir)

    def _grown(self, part: int, i: int, first: int | None, needed: int | None) -> SampleSource:
        """The dataset of source i for `first` samples, and appended epochs for as many as are `needed`."""
        parts: list[GPTDataset | PackedDataset] = [self._rows(part, i, first, self.seed)]
        self.reports.setdefault(_PARTS[part], []).append(f"{self.sources[i].name}: {parts[0].report}")
        one_epoch = None if self._tokens(part, i) > self.config.seq_len else 1
        while needed is not None and sum(map(len, parts)) < needed:
            parts.append(self._rows(part, i, one_epoch, (self.seed + len(parts) * _NEXT_ORDER) % 2**32))
        return parts[0] if len(parts) == 1 else ChainedDataset(parts)

    def _rows(self, part: int, i: int, num_samples: int | None, seed: int) -> GPTDataset | PackedDataset:
        config, source = self.config, self.sources[i]
        rules = DocumentRules(
            boundaries=config.boundaries,
            reset_attention=config.reset_attention,
            reset_positions=config.reset_positions,
            eod=source.eod,
            eod_mask_loss=config.eod_mask_loss,
        )
        settings: dict[str, Any] = {
            "seq_len": config.seq_len, "seed": seed, "num_samples": num_samples, "sequences": self._range(part, i),
            "split_name": _PARTS[part], "vocab_size": source.checked_vocab, "cache_dir": self.index_dir,
        }  # fmt: skip
        if config.pack == "concat":
            partial = config.keep_partial and part == 1
            counts: dict[str, Any] = {"keep_partial": partial, "float32_counts": config.float32_counts and partial}
            return GPTDataset(source.data, **vars(rules), **settings, **counts)
        return PackedDataset(source.data, pack=config.pack, rules=rules, **settings)

    def _report(self, part: int, used: list[int], counts: list[int]) -> None:
        """Says what is drawn from each source: its share of samples, and how often it is read for them."""
        total = max(sum(counts), 1)
        for i, count in zip(used, counts, strict=True):
            epochs = count * self.config.seq_len / max(self._tokens(part, i), 1)
            text = f"{self.sources[i].name}: {count} samples ({count / total:.1%}), {epochs:.2f} epochs"
            if epochs > 1 and self.config.pack == "concat":
                text += f": each document up to {math.ceil(epochs)} times"
            self.reports.setdefault(f"{_PARTS[part]} shares", []).append(text)
