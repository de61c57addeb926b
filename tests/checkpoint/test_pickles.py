"""What a pickle may name: members of enums as every version of Python writes them, and nothing beyond."""

from __future__ import annotations

import io

import pytest

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.megatron.pickles import Inert, load_pickle


def _getattr_of(module: str, owner: str, name: str) -> io.BytesIO:
    """The pickle of builtins.getattr(module.owner, name), opcode by opcode."""
    return io.BytesIO(f"cbuiltins\ngetattr\n(c{module}\n{owner}\nV{name}\ntR.".encode())


def test_a_member_of_an_enum_by_name() -> None:
    member = load_pickle(_getattr_of("megatron.core.transformer.enums", "AttnMaskType", "causal"), "x")
    assert isinstance(member, Inert)
    assert (member.origin, member.args) == ("megatron.core.transformer.enums.AttnMaskType", ("causal",))


@pytest.mark.parametrize(("module", "owner"), [("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor")])
def test_nothing_is_got_from_what_is_real(module: str, owner: str) -> None:
    with pytest.raises(CheckpointError, match=r"asks for '__init__' of .* it is refused"):
        load_pickle(_getattr_of(module, owner, "__init__"), "x")
