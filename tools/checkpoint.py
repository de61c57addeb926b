"""Looks into checkpoints, compares them and writes them anew, on one CPU.

    python tools/checkpoint.py inspect runs/x
    python tools/checkpoint.py verify runs/x --all
    python tools/checkpoint.py diff runs/x runs/y/checkpoints/step_00000010
    python tools/checkpoint.py reshard runs/x runs/y --layout tp2+pp2
    python tools/checkpoint.py average runs/x runs/mean --last 3
    python tools/checkpoint.py merge-lora runs/tuned runs/merged
    python tools/checkpoint.py import-megatron /data/megatron_run runs/start --vocab-size 50257
    python tools/checkpoint.py from-hf /data/Qwen3-0.6B runs/qwen3
    python tools/checkpoint.py to-hf runs/qwen3 /data/mine --dtype bf16

A checkpoint is its folder, or a run folder whose latest is meant; a path, or a URL of fsspec. What is written goes into
a run folder. Tensors are read one by one; bounds of the memory are in docs/checkpoints.md. The exit status is 0, or 1
when a checkpoint is damaged, two differ, or something was wrong, with a line that says what.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megalite.checkpoint import store
from megalite.checkpoint.average import averaged
from megalite.checkpoint.compare import Comparison, compare, flat, nbytes_of
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import folder_at
from megalite.checkpoint.lora import merged, merged_state
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.megatron.convert import import_megatron
from megalite.checkpoint.reading import damages
from megalite.checkpoint.reshard import resharded, state_in_precision, weights_state
from megalite.checkpoint.rewrite import LARGEST, Cuts, NewTensor, cut_by_rank, cut_evenly, write_checkpoint
from megalite.checkpoint.stored import StoredCheckpoint
from megalite.checkpoint.tables import (
    by_kind,
    differences_table,
    kinds_table,
    layers_table,
    pairs_table,
    size_text,
    state_table,
    tensors_table,
)
from megalite.config import Config
from megalite.config.check import check
from megalite.config.load import from_dict
from megalite.config.values import dump_yaml
from megalite.files import output_file, replace_json
from megalite.hugging_face import export_adapter_folder, export_folder, import_folder
from megalite.layout import parse_layout
from megalite.train.held import stored_boxes
from megalite.train.resume import identity

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""Precisions as train.precision has them."""

Report = Callable[[int], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False, soft_wrap=True) if sys.stdout.isatty() else Console(highlight=False, width=160)
    try:
        return arguments.run(arguments, console)
    except (CheckpointError, ValueError, OSError) as error:
        print(f"checkpoint.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("checkpoint.py: interrupted; nothing was written", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(run=run)
        return added

    inspect = command("inspect", _inspect, "what a checkpoint holds")
    inspect.add_argument("checkpoint", metavar="CHECKPOINT")
    inspect.add_argument("--tensors", metavar="PATTERN", help="list tensors like this one by one, such as 'layers.3.*'")
    inspect.add_argument("--json", type=output_file, metavar="FILE", help="write it all, with every tensor")

    verify = command("verify", _verify, "read everything and compare it with its checksums")
    verify.add_argument("checkpoint", metavar="CHECKPOINT")
    verify.add_argument("--all", action="store_true", help="all complete checkpoints of a run")

    diff = command("diff", _diff, "what differs between two checkpoints")
    diff.add_argument("a", metavar="A")
    diff.add_argument("b", metavar="B")
    diff.add_argument(
        "--tensors", metavar="PATTERN", default="*", help="tensors like this alone, such as 'parameter/*'"
    )
    diff.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X", help="relative differences max|a-b| / max|a| to pass over"
    )
    diff.add_argument("--rows", type=int, default=40, metavar="N", help="tensors to show (default 40; 0: all)")
    diff.add_argument("--json", type=output_file, metavar="FILE", help="write all differences")

    reshard = command("reshard", _reshard, "write a checkpoint into other files, bit for bit, or in another precision")
    reshard.add_argument("source", metavar="CHECKPOINT")
    reshard.add_argument("run_dir", metavar="RUN_DIR")
    how = reshard.add_mutually_exclusive_group()
    how.add_argument("--layout", metavar="LAYOUT", help="cut as the ranks of a layout are, such as tp2+pp2")
    how.add_argument("--files", type=int, metavar="N", help="cut into N files of one size (default 1)")
    reshard.add_argument("--dtype", choices=tuple(DTYPES), help="precision of the parameters")
    reshard.add_argument("--only", choices=("weights",), help="leave the optimizer state out")
    _add_largest(reshard)

    average = command("average", _average, "the mean of the weights of several checkpoints")
    average.add_argument("sources", metavar="CHECKPOINT", nargs="+")
    average.add_argument("run_dir", metavar="RUN_DIR")
    average.add_argument("--last", type=int, metavar="K", help="of one run: its K newest complete checkpoints")
    average.add_argument("--weights", type=float, nargs="+", metavar="W", help="one for each; divided by their sum")
    average.add_argument("--files", type=int, default=1, metavar="N", help="files of one size to write (default 1)")
    _add_largest(average)

    merge = command("merge-lora", _merge_lora, "put low-rank adapters into the weights")
    merge.add_argument("source", metavar="CHECKPOINT")
    merge.add_argument("run_dir", metavar="RUN_DIR")
    merge.add_argument("--base", metavar="CHECKPOINT", help="the frozen weights, of a run with lora.separate")
    merge.add_argument("--files", type=int, default=1, metavar="N", help="files of one size to write (default 1)")
    _add_largest(merge)

    megatron = command("import-megatron", _import_megatron, "weights of a Megatron-LM GPT (torch or torch_dist)")
    megatron.add_argument("source", metavar="MEGATRON_DIR")
    megatron.add_argument("run_dir", metavar="RUN_DIR")
    megatron.add_argument("--vocab-size", type=int, metavar="V", help="words without the padding of the embedding")
    megatron.add_argument("--dtype", choices=tuple(DTYPES), help="precision of the parameters (default: as stored)")
    megatron.add_argument("--files", type=int, default=1, metavar="N", help="files of one size to write (default 1)")
    _add_largest(megatron)

    from_hf = command("from-hf", _from_hf, "the model in a folder of Hugging Face (safetensors)")
    from_hf.add_argument("source", metavar="HF_DIR")
    from_hf.add_argument("run_dir", metavar="RUN_DIR")
    from_hf.add_argument("--dtype", choices=tuple(DTYPES), help="precision of the parameters (default: as stored)")
    from_hf.add_argument(
        "--ignore", nargs="+", default=(), metavar="KEY", help="keys of config.json that are known to change nothing"
    )
    from_hf.add_argument("--files", type=int, default=1, metavar="N", help="files of one size to write (default 1)")
    _add_largest(from_hf)

    to_hf = command("to-hf", _to_hf, "write a folder that transformers loads")
    to_hf.add_argument("source", metavar="CHECKPOINT")
    to_hf.add_argument("out", metavar="HF_DIR")
    to_hf.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights (default: as the masters are)")
    to_hf.add_argument(
        "--max-shard", type=int, default=5 << 10, metavar="MIB", help="MiB of a file at most (default 5120)"
    )
    to_hf.add_argument("--like", metavar="HF_DIR", help="keep config, tokenizer and generation config of this folder")
    to_hf.add_argument("--tokenizer", metavar="NAME", help="tokenizer to write (default: that of the run's data)")
    to_hf.add_argument("--adapters", action="store_true", help="write low-rank adapters alone, as peft has them")
    to_hf.add_argument("--base", metavar="HF_DIR", help="with --adapters: the model that they belong to")
    return parser


def _add_largest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--largest", type=int, default=LARGEST >> 20, metavar="MIB",
        help=f"MiB of a stored rectangle at most, which a rank that loads has in memory (default {LARGEST >> 20})",
    )  # fmt: skip


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Report]:
    """A bar with rate and time left on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.update(task, advance=count)


# ---- inspect


def _inspect(arguments: argparse.Namespace, console: Console) -> int:
    with StoredCheckpoint(arguments.checkpoint) as found:
        manifest = found.manifest
        changed = _changed_settings(manifest.state.get("config"))
        console.print(f"[bold]{escape(str(found))}[/]: step {manifest.step}")
        if others := _others(arguments.checkpoint, found):
            console.print(f"complete checkpoints of the run, oldest first: {', '.join(others)}")
        if manifest.layout:
            told = ", ".join(f"{name} {value}" for name, value in manifest.layout.items() if value not in (None, 0, 1))
            console.print(f"saved on: {told or 'one rank'}")
        console.print(kinds_table(found))
        if arguments.tensors is not None:
            console.print(tensors_table(found, found.select(pattern=arguments.tensors)))
        else:
            console.print(layers_table(found))
        console.print(pairs_table("State", _counters(manifest)))
        if changed is not None:
            console.print(pairs_table("Settings that are not the defaults", changed))
        if arguments.json is not None:
            replace_json(arguments.json, _described(found, changed))
    return 0


def _others(address: str, found: StoredCheckpoint) -> list[str]:
    """All checkpoints of a run, if `address` is that of one."""
    return [] if str(found.address).rstrip("/") == address.rstrip("/") else store.complete(address)


def _counters(manifest: Manifest) -> dict[str, Any]:
    return flat({name: value for name, value in manifest.state.items() if name not in ("config", "fingerprints")})


def _changed_settings(config: Any) -> dict[str, Any] | None:
    """Of the settings that a run has kept those that are not the defaults; None where it has kept none."""
    if not isinstance(config, dict):
        return None
    defaults = identity(Config())
    return {name: value for name, value in config.items() if name not in defaults or defaults[name] != value}


def _described(found: StoredCheckpoint, changed: dict[str, Any] | None) -> dict[str, Any]:
    manifest = found.manifest
    return {
        "checkpoint": str(found), "step": manifest.step, "layout": manifest.layout, "kinds": by_kind(found),
        "files": {name: mark.size for name, mark in manifest.files.items()}, "state": _counters(manifest),
        "changed_settings": changed,
        "tensors": [
            {"key": key, "dtype": found.tensors[key].dtype, "shape": list(found.tensors[key].shape),
             "bytes": nbytes_of(found.tensors[key]), "pieces": len(found.tensors[key].pieces)}
            for key in found.select()
        ],
    }  # fmt: skip


# ---- verify


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.all:
        root = store.checkpoints_folder(arguments.checkpoint)
        addresses = [root.child(name).address for name in store.complete(arguments.checkpoint)]
        if not addresses:
            raise CheckpointError(f"{arguments.checkpoint} has no complete checkpoints: --all takes a run folder")
    else:
        addresses = [store.find_checkpoint(arguments.checkpoint)]
    return max([_verify_one(address, console) for address in addresses])


def _verify_one(address: Path | str, console: Console) -> int:
    try:
        manifest = Manifest.read(folder_at(address))
    except CheckpointError as error:
        console.print(f"[red]{escape(str(error))}", soft_wrap=True)
        return 1
    size = sum(mark.size for mark in manifest.files.values())
    with _progress(f"step {manifest.step}", size) as report:
        found = list(damages(folder_at(address), manifest, sorted(manifest.files), report))
    for damage in found:
        console.print(f"[red]{escape(damage)}", soft_wrap=True)
    if not found:
        pieces = sum(len(entry.pieces) for entry in manifest.tensors.values())
        console.print(
            f"{escape(str(address))} is intact: {len(manifest.tensors)} tensors in {pieces} pieces,"
            f" {len(manifest.files)} {'file' if len(manifest.files) == 1 else 'files'}, {size_text(size)}",
            soft_wrap=True,
        )
    return int(bool(found))


# ---- diff


def _diff(arguments: argparse.Namespace, console: Console) -> int:
    with StoredCheckpoint(arguments.a) as a, StoredCheckpoint(arguments.b) as b:
        common = [key for key in a.select(pattern=arguments.tensors) if key in b.tensors]
        if not common and not b.select(pattern=arguments.tensors) and not a.select(pattern=arguments.tensors):
            raise CheckpointError(f"--tensors {arguments.tensors}: neither checkpoint has a tensor like that")
        with _progress("comparing", sum(nbytes_of(a.tensors[key]) for key in common)) as report:
            found = compare(a, b, pattern=arguments.tensors, tolerance=arguments.tolerance, progress=report)
        console.print(f"a: {escape(str(a))}, step {a.manifest.step}")
        console.print(f"b: {escape(str(b))}, step {b.manifest.step}")
    _print_comparison(found, arguments, console)
    if arguments.json is not None:
        replace_json(arguments.json, _comparison_values(found))
    return 0 if found.is_equal else 1


def _print_comparison(found: Comparison, arguments: argparse.Namespace, console: Console) -> None:
    for name, keys in (("a", found.only_a), ("b", found.only_b)):
        if keys:
            shown = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            console.print(f"[red]{len(keys)} tensors are in {name} only:[/] {escape(shown)}")
    if found.tensors:
        console.print(differences_table(found, arguments.rows))
    if found.state:
        console.print(state_table(found.state))
    within = f" within {arguments.tolerance:g}" if arguments.tolerance else ""
    console.print(f"{found.num_equal} tensors are equal{within}, {len(found.tensors)} differ")


def _comparison_values(found: Comparison) -> dict[str, Any]:
    """As JSON, which has no infinity."""
    return {
        "only_a": found.only_a, "only_b": found.only_b, "equal": found.num_equal,
        "tensors": [
            {"key": row.key, "what": row.what, "largest": _finite(row.largest), "relative": _finite(row.relative),
             "count": row.count, "size": row.size}
            for row in found.tensors
        ],
        "state": {name: {"a": left, "b": right} for name, (left, right) in found.state.items()},
    }  # fmt: skip


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


# ---- reshard, average, import-megatron


def _reshard(arguments: argparse.Namespace, console: Console) -> int:
    with StoredCheckpoint(arguments.source) as source:
        weights_only = arguments.only == "weights"
        dtype = DTYPES[arguments.dtype] if arguments.dtype is not None else None
        tensors = resharded(source, dtype=dtype, weights_only=weights_only)
        state = weights_state(source.manifest.state) if weights_only else source.manifest.state
        if arguments.dtype is not None:
            state = state_in_precision(state, arguments.dtype)
        if arguments.layout is not None:
            ranks, layout = _ranks_of(arguments.layout, source.manifest)
            cuts = cut_by_rank(tensors, ranks, _largest(arguments))
        else:
            num_files = arguments.files if arguments.files is not None else 1
            cuts, layout = _even(tensors, num_files, arguments), {"files": num_files}
        return _write(arguments.run_dir, source.manifest.step, tensors, cuts, state, layout, console)


def _ranks_of(text: str, manifest: Manifest) -> tuple[list[Any], dict[str, Any]]:
    """What each rank of a layout would store, and the layout as a manifest has it."""
    settings = manifest.state.get("config")
    if not isinstance(settings, dict):
        raise CheckpointError("the checkpoint does not say what its model is; give --files instead of --layout")
    layout = parse_layout(text)
    model = {name.removeprefix("model."): value for name, value in settings.items() if name.startswith("model.")}
    config = layout.apply(from_dict({"model": model}))
    ranks = stored_boxes(config, layout.num_ranks)
    sizes = {name: getattr(layout.parallel, name) for name in ("tp", "pp", "cp", "ep", "etp", "vpp")}
    return [boxes for boxes in ranks if boxes], {**sizes, "dp": layout.dp, "zero": 0}


def _average(arguments: argparse.Namespace, console: Console) -> int:
    with ExitStack() as stack:
        addresses = _averaged_addresses(arguments)
        sources = [stack.enter_context(StoredCheckpoint(address)) for address in addresses]
        tensors = averaged(sources, arguments.weights)
        last = max(sources, key=lambda source: source.manifest.step)
        state = weights_state(sources[-1].manifest.state) | {"averaged": [str(source) for source in sources]}
        cuts, layout = _even(tensors, arguments.files, arguments), {"files": arguments.files}
        for source in sources:
            console.print(f"with {escape(str(source))}, step {source.manifest.step}")
        return _write(arguments.run_dir, last.manifest.step, tensors, cuts, state, layout, console)


def _averaged_addresses(arguments: argparse.Namespace) -> list[Path | str]:
    if arguments.last is None:
        if len(arguments.sources) < 2:
            raise ValueError("one checkpoint has no mean; name several, or --last K of a run")
        return list(arguments.sources)
    if len(arguments.sources) != 1 or arguments.last < 1:
        raise ValueError(f"--last {arguments.last} takes one run folder, and at least 1")
    run_dir = arguments.sources[0]
    names = store.complete(run_dir)
    if len(names) < arguments.last:
        raise CheckpointError(
            f"{run_dir} has {len(names)} complete checkpoints ({', '.join(names) or 'none'}), not {arguments.last};"
            " checkpoint.keep_last says how many are kept"
        )
    return [store.checkpoints_folder(run_dir).child(name).address for name in names[-arguments.last :]]


def _merge_lora(arguments: argparse.Namespace, console: Console) -> int:
    with ExitStack() as stack:
        source = stack.enter_context(StoredCheckpoint(arguments.source))
        base = stack.enter_context(StoredCheckpoint(arguments.base)) if arguments.base is not None else None
        tensors = merged(source, base)
        cuts, layout = _even(tensors, arguments.files, arguments), {"files": arguments.files}
        step, state = source.manifest.step, merged_state(source)
        status = _write(arguments.run_dir, step, tensors, cuts, state, layout, console)
    _write_config_without_adapters(Path(str(source)), Path(arguments.run_dir))
    return status


def _write_config_without_adapters(checkpoint: Path, run_dir: Path) -> None:
    """The settings of the run that the checkpoint is of, if they lie where its own do, for tools that read them."""
    path = checkpoint.resolve().parents[1] / "config.yaml"
    if checkpoint.is_dir() and path.is_file() and not (run_dir / "config.yaml").exists():
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        settings.pop("lora", None)
        (run_dir / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def _import_megatron(arguments: argparse.Namespace, console: Console) -> int:
    dtype = DTYPES[arguments.dtype] if arguments.dtype is not None else None
    found = import_megatron(arguments.source, vocab_size=arguments.vocab_size, dtype=dtype)
    precision = arguments.dtype or found.settings.precision
    content = {
        "model": found.settings.model,
        "data": {"seq_len": found.settings.seq_len},
        "train": {"precision": precision},
    }
    config = from_dict(content)
    check(config, 1)  # what the model cannot be is said before anything is written
    for note in found.settings.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
    settings = {name: value for name, value in identity(config).items() if name.startswith("model.")}
    state = {"updates": 0, "megatron": str(arguments.source), "config": settings}
    cuts, layout = _even(found.tensors, arguments.files, arguments), {"files": arguments.files}
    _write(arguments.run_dir, found.step, found.tensors, cuts, state, layout, console)
    folder_at(arguments.run_dir).replace_text("config.yaml", dump_yaml(content))
    _print_start(arguments.run_dir, console)
    return 0


def _from_hf(arguments: argparse.Namespace, console: Console) -> int:
    _check_files(arguments.files)
    dtype = DTYPES[arguments.dtype] if arguments.dtype is not None else None
    path = import_folder(
        arguments.source, arguments.run_dir, progress=_progress, dtype=dtype, files=arguments.files,
        largest=_largest(arguments), ignore=arguments.ignore,
    )  # fmt: skip
    console.print(f"{escape(str(path))}: the model of {escape(arguments.source)}")
    _print_start(arguments.run_dir, console)
    return 0


def _to_hf(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.max_shard < 1:
        raise ValueError(f"--max-shard {arguments.max_shard} must be at least 1")
    if arguments.base is not None and not arguments.adapters:
        raise ValueError(f"--base {arguments.base} is for --adapters")
    dtype = DTYPES[arguments.dtype] if arguments.dtype is not None else None
    if arguments.adapters:
        path = export_adapter_folder(
            arguments.source, arguments.out, progress=_progress, base=arguments.base, like=arguments.like, dtype=dtype
        )
    else:
        path = export_folder(
            arguments.source, arguments.out, progress=_progress, max_shard=arguments.max_shard << 20,
            like=arguments.like, dtype=dtype, tokenizer=arguments.tokenizer,
            told=lambda note: console.print(f"[yellow]note:[/] {escape(note)}"),
        )  # fmt: skip
    console.print(f"{escape(str(path))}: {', '.join(sorted(file.name for file in path.iterdir()))}")
    return 0


def _print_start(run_dir: str, console: Console) -> None:
    console.print(f"start a run from it: --config {escape(run_dir)}/config.yaml --checkpoint.load {escape(run_dir)}")


def _check_files(num_files: int) -> None:
    if num_files < 1:
        raise ValueError(f"--files {num_files} must be at least 1")


def _even(tensors: Sequence[NewTensor], num_files: int, arguments: argparse.Namespace) -> Cuts:
    _check_files(num_files)
    return cut_evenly(tensors, num_files, _largest(arguments))


def _largest(arguments: argparse.Namespace) -> int:
    if arguments.largest < 1:
        raise ValueError(f"--largest {arguments.largest} must be at least 1")
    return arguments.largest << 20


def _write(
    run_dir: str,
    step: int,
    tensors: Sequence[NewTensor],
    cuts: Cuts,
    state: Mapping[str, Any],
    layout: Mapping[str, Any],
    console: Console,
) -> int:
    size = sum(tensor.nbytes for tensor in tensors)
    with _progress("writing", size) as report:
        path = write_checkpoint(run_dir, step, tensors, cuts, state=state, layout=layout, progress=report)
    console.print(f"{escape(str(path))}: {len(tensors)} tensors, {size_text(size)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
