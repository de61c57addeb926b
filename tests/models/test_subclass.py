"""The architecture of docs/new_architecture.md, as it stands there, on several layouts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType

import pytest

from megalite.layout import parse_layout
from megalite.models import MODELS, lfm2
from megalite.testing.layouts import prove_layouts
from megalite.testing.world import World
from tests.models import primer
from tests.tiny import config_for


def add_primer() -> None:
    """What the page tells the reader to do in megalite/models/__init__.py."""
    MODELS["primer"] = primer.Primer


@pytest.mark.parametrize("layout", ["tp2+sp", "pp2+dp2+recompute:full"])
def test_a_users_architecture(layout: str, tokens: str, references: Path, world: World) -> None:
    config = config_for("llama", tokens, references)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, name="primer", ffn_hidden_size=32))
    (difference,) = prove_layouts(config, [parse_layout(layout)], world, references, setup=add_primer)
    assert difference.passed, difference.first_diff


@pytest.mark.parametrize("module", [primer, lfm2], ids=["primer", "lfm2"])
def test_the_page_shows_this_code(module: ModuleType) -> None:
    page = Path(__file__).parents[2] / "docs" / "new_architecture.md"
    assert module.__file__ is not None
    assert Path(module.__file__).read_text() in page.read_text()
