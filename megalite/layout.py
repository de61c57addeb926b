"""Layouts on one line: `tp2+sp+pp2v2:zb_v+cp4:ulysses_ring+ep2+etp2+dp2+zero3+recompute:full+offload:cpu+mbs2`.

Parts come in any order; a missing one is 1 or off. The data-parallel size is always that of the dense model:
ranks = tp * cp * pp * dp, and an unnamed dp is the least that the expert axes fit into. `ep4:all_gather` and
`ep4:hierarchical2` (2 ranks to a node) say how tokens reach their experts, `etp2:whole` that every tensor-parallel rank
sends all of them, `cp8:ulysses_ring4` that blocks of 4 context-parallel ranks exchange sequence for heads, and
`cp2:ring,every:4=all_gather` that every fourth layer gathers keys.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from dataclasses import dataclass, field
from typing import Any

from megalite.config import Config
from megalite.grid import CONTEXT_MODES, ParallelConfig, context_mode_problem

_SIZE = re.compile(r"(tp|pp|cp|ep|etp|dp|mbs|zero)(\d+)(?:v(\d+))?(?:g(\d+))?(?::([a-z0-9_,:=]+|csv:[^+]+))?")
_PARTS = ("tp", "pp", "cp", "ep", "etp", "dp", "mbs", "zero", "sp", "recompute:", "offload:")
_TAGS = {"pp": "schedule", "cp": "cp_mode", "ep": "expert_dispatch", "etp": "cut_expert_tokens"}
_NODES = re.compile(r"hierarchical([1-9]\d*)")
_BLOCKS = re.compile(r"(ulysses_ring)([1-9]\d*)")
_WHOLE = "whole"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout string, taken apart."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The model-parallel part; the order of the axes is not part of a layout."""
    dp: int = 1
    """Data-parallel size."""
    recompute: str = "none"
    """What backward computes again, as train.recompute."""
    offload: str = "none"
    """Where the optimizer state lives, as optim.offload."""
    micro_batch_size: int | None = None
    """Rows of a micro-batch; the run's own when absent."""

    @property
    def num_ranks(self) -> int:
        """Ranks that the layout takes."""
        return self.parallel.tp * self.parallel.cp * self.parallel.pp * self.dp

    def apply(self, config: Config) -> Config:
        """`config` under this layout: everything else, the model and the global batch included, stays."""
        parallel = dataclasses.replace(self.parallel, order=config.parallel.order)
        train: dict[str, Any] = {"recompute": self.recompute}
        if self.micro_batch_size is not None:
            train["micro_batch_size"] = self.micro_batch_size
        return dataclasses.replace(
            config,
            parallel=parallel,
            train=dataclasses.replace(config.train, **train),
            optim=dataclasses.replace(config.optim, offload=self.offload),
        )

    def __str__(self) -> str:
        return format_layout(self)


def parse_layout(text: str) -> Layout:
    """Reads a layout string; raises ValueError that names the part and what it may have meant."""
    seen: dict[str, Any] = {}
    for part in text.split("+") if text.strip() != "single" else ():
        for name, value in _parse_part(part.strip(), text).items():
            if name in seen:
                raise ValueError(f"layout {text!r}: {part!r} sets {name} a second time")
            seen[name] = value
    own = {name: seen.pop(name) for name in ("dp", "recompute", "offload", "micro_batch_size") if name in seen}
    parallel = ParallelConfig(**seen)
    own.setdefault("dp", _least_dp(parallel))
    return Layout(parallel=parallel, **own)


def _least_dp(parallel: ParallelConfig) -> int:
    """The smallest dp for which ep * etp divides tp * cp * dp."""
    experts = parallel.ep * parallel.etp
    return experts // math.gcd(experts, parallel.tp * parallel.cp)


def _parse_part(part: str, text: str) -> dict[str, Any]:
    if part == "sp":
        return {"sequence_parallel": True}
    for name in ("recompute", "offload"):
        if part.startswith(f"{name}:") and len(part) > len(name) + 1:
            return {name: part.removeprefix(f"{name}:")}
    found = _SIZE.fullmatch(part)
    if found is None:
        raise ValueError(f"layout {text!r}: {part!r} is not a part of a layout{_hint(part)}")
    axis, size, chunks, group, tag = found[1], int(found[2]), found[3], found[4], found[5]
    if ((chunks or group) and axis != "pp") or (tag and axis not in _TAGS):
        raise ValueError(
            f"layout {text!r}: {part!r}: only pp takes v<chunks> and g<group size>,"
            f" only {', '.join(_TAGS)} take :<name>"
        )
    if (size < 1 and axis != "zero") or 0 in (int(chunks or 1), int(group or 1)):
        raise ValueError(f"layout {text!r}: {part!r}: sizes are at least 1")
    values: dict[str, Any] = {"micro_batch_size" if axis == "mbs" else axis: size}
    if chunks:
        values["vpp"] = int(chunks)
    if group:
        values["group_size"] = int(group)
    if tag:
        values |= _tagged(axis, tag, part, text)
    return values


def _tagged(axis: str, tag: str, part: str, text: str) -> dict[str, Any]:
    """The fields that `axis<size>:tag` sets besides the size."""
    if axis == "etp":
        if tag != _WHOLE:
            raise ValueError(f"layout {text!r}: {part!r}: etp takes :{_WHOLE} only")
        return {_TAGS[axis]: False}
    if axis == "cp":
        return _context_mode(tag, part, text)
    if axis != "ep":
        return {_TAGS[axis]: tag}
    if nodes := _NODES.fullmatch(tag):
        return {_TAGS[axis]: "hierarchical", "expert_node_size": int(nodes[1])}
    if tag not in ("all_to_all", "all_gather"):
        raise ValueError(
            f"layout {text!r}: {part!r}: ep takes :all_to_all, :all_gather or :hierarchical with the ranks of a node,"
            " such as :hierarchical2"
        )
    return {_TAGS[axis]: tag}


def _context_mode(tag: str, part: str, text: str) -> dict[str, Any]:
    """The fields that `cp<size>:tag` sets besides the size."""
    blocks = {int(size) for _, size in _BLOCKS.findall(tag)}
    mode = _BLOCKS.sub(r"\1", tag)
    if len(blocks) > 1 or context_mode_problem(mode) is not None:
        raise ValueError(
            f"layout {text!r}: {part!r}: cp takes {', '.join(f':{mode}' for mode in CONTEXT_MODES)}, the last with the"
            " ranks of a block, such as :ulysses_ring4, or 2; and other modes for some layers, such as"
            " :ring,every:4=all_gather"
        )
    return {"cp_mode": mode} | ({"cp_ulysses": blocks.pop()} if blocks else {})


def _hint(part: str) -> str:
    name = re.sub(r"\d.*$", "", part.partition(":")[0])
    near = difflib.get_close_matches(name, [known.rstrip(":") for known in _PARTS], n=1, cutoff=0.5)
    known = "tp2 sp pp2 pp2v2:1f1b cp2:ring ep2 etp2 dp2 zero1 recompute:full offload:cpu mbs2"
    return f"; did you mean {near[0]}? Parts look like {known}" if near else f"; parts look like {known}"


def format_layout(layout: Layout) -> str:
    """The layout string of `layout`: what is 1 or off is left out; one rank alone is `single`."""
    parallel, default = layout.parallel, ParallelConfig()

    def sized(name: str, size: int, tag: str = "") -> str:
        return f"{name}{size}{tag}" if size > 1 or tag else ""

    chunks = f"v{parallel.vpp}" if parallel.vpp > 1 else ""
    chunks += f"g{parallel.group_size}" if parallel.group_size is not None else ""
    schedule = f":{parallel.schedule}" if parallel.schedule != default.schedule else ""
    mode = f":{parallel.cp_mode}" if parallel.cp_mode != default.cp_mode else ""
    if parallel.cp_ulysses != default.cp_ulysses:
        mode = mode.replace("ulysses_ring", f"ulysses_ring{parallel.cp_ulysses}")
    dispatch = parallel.expert_dispatch if parallel.expert_dispatch != default.expert_dispatch else ""
    if dispatch and parallel.expert_node_size is not None:
        dispatch += str(parallel.expert_node_size)
    parts = [
        sized("tp", parallel.tp),
        "sp" if parallel.sequence_parallel else "",
        sized("pp", parallel.pp, chunks + schedule),
        sized("cp", parallel.cp, mode),
        sized("ep", parallel.ep, f":{dispatch}" if dispatch else ""),
        sized("etp", parallel.etp, "" if parallel.cut_expert_tokens else f":{_WHOLE}"),
        f"dp{layout.dp}" if layout.dp != _least_dp(parallel) else "",
        f"zero{parallel.zero}" if parallel.zero else "",
        f"recompute:{layout.recompute}" if layout.recompute != "none" else "",
        f"offload:{layout.offload}" if layout.offload != "none" else "",
        f"mbs{layout.micro_batch_size}" if layout.micro_batch_size is not None else "",
    ]
    return "+".join(part for part in parts if part) or "single"
