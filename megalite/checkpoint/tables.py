"""Tables of checkpoints, for people."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from megalite.checkpoint.compare import Comparison, nbytes_of
from megalite.checkpoint.stored import WEIGHTS, StoredCheckpoint, kind_of, name_of


def by_kind(found: StoredCheckpoint) -> list[dict[str, Any]]:
    """Tensors, elements, bytes and stored pieces of each kind and dtype; weights first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for key, entry in found.tensors.items():
        row = rows.setdefault(
            (kind_of(key), entry.dtype),
            {"kind": kind_of(key), "dtype": entry.dtype, "tensors": 0, "elements": 0, "bytes": 0, "pieces": 0},
        )
        row["tensors"] += 1
        row["elements"] += math.prod(entry.shape)
        row["bytes"] += nbytes_of(entry)
        row["pieces"] += len(entry.pieces)

    def place(row: Mapping[str, Any]) -> tuple[int, str, str]:
        kind = row["kind"]
        return WEIGHTS.index(kind) if kind in WEIGHTS else len(WEIGHTS), kind, row["dtype"]

    return sorted(rows.values(), key=place)


def kinds_table(found: StoredCheckpoint) -> Table:
    """What there is of each kind, and in all."""
    table = _table("kind", "dtype", numbers=("tensors", "elements", "bytes", "pieces"))
    rows = by_kind(found)
    for row in rows:
        table.add_row(row["kind"], row["dtype"], *_counts(row))
    table.add_section()
    total = {name: sum(row[name] for row in rows) for name in ("tensors", "elements", "bytes", "pieces")}
    count = len(found.manifest.files)
    table.add_row(f"in {count} file{'s' if count != 1 else ''}", "", *_counts(total))
    return table


def layers_table(found: StoredCheckpoint) -> Table:
    """The parameters, with one row for what many layers have alike."""
    rows: dict[tuple[str, str, tuple[int, ...]], int] = {}
    for key in found.select(pattern="parameter/*"):
        entry = found.tensors[key]
        row = re.sub(r"\blayers\.\d+\.", "layers.*.", name_of(key)), entry.dtype, entry.shape
        rows[row] = rows.get(row, 0) + 1
    table = _table("parameter", "dtype", "shape", numbers=("tensors",))
    for (name, dtype, shape), count in rows.items():
        table.add_row(*map(escape, (name, dtype, str(list(shape)), str(count))))
    return table


def tensors_table(found: StoredCheckpoint, keys: Sequence[str]) -> Table:
    """Tensors one by one."""
    table = _table("tensor", "dtype", "shape", numbers=("bytes", "pieces"))
    for key in keys:
        entry = found.tensors[key]
        row = (key, entry.dtype, str(list(entry.shape)), size_text(nbytes_of(entry)), str(len(entry.pieces)))
        table.add_row(*map(escape, row))
    return table


def differences_table(found: Comparison, most: int) -> Table:
    """The tensors that differ most, `most` of them (0: all)."""
    rows = found.tensors[:most] if most else found.tensors
    table = _table("tensor", "", numbers=("max|a-b| / max|a|", "max|a-b|", "elements", "of"))
    more = f", the first {len(rows)} of them here" if len(rows) < len(found.tensors) else ""
    table.title = f"{len(found.tensors)} tensors differ{more}"
    for row in rows:
        numbers = f"{row.relative:.3g}", f"{row.largest:.3g}", f"{row.count:,}", f"{row.size:,}"
        table.add_row(escape(row.key), escape(row.what), *numbers)
    return table


def state_table(state: Mapping[str, tuple[Any, Any]]) -> Table:
    """Counters and settings that differ, by name."""
    table = _table("state and settings", "a", "b")
    for name, (left, right) in state.items():
        table.add_row(escape(name), escape(_shown(left)), escape(_shown(right)))
    return table


def pairs_table(title: str, pairs: Mapping[str, Any]) -> Table:
    """Names and values."""
    table = _table(title, "")
    for name, value in pairs.items():
        table.add_row(escape(name), escape(_shown(value)))
    return table


def size_text(count: int) -> str:
    """Bytes in a unit that fits."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.2f} {unit}"
    return f"{count} B"


def _table(*texts: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for number, column in enumerate(texts):
        table.add_column(column, no_wrap=number == 0)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def _counts(row: Mapping[str, int]) -> tuple[str, str, str, str]:
    return f"{row['tensors']:,}", f"{row['elements']:,}", size_text(row["bytes"]), f"{row['pieces']:,}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
