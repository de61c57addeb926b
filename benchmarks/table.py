"""Rows of figures as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table


def make_table(
    title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], heads: Mapping[str, str] | None = None
) -> Table:
    """`columns`: key of a row -> format, empty for text; `heads`: titles that are not the key itself. None is "-"."""
    heads = heads or {}
    table = Table(title=title)
    for column, form in columns.items():
        table.add_column(heads.get(column, column.replace("_", " ")), justify="right" if form else "left")
    for row in rows:
        table.add_row(*("-" if row[column] is None else format(row[column], form) for column, form in columns.items()))
    return table
