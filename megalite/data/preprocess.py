"""Text to token files: any number of worker processes, any interruption, the same files."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megalite.data.encoder import Encoded, Rejected, TextOptions, Totals
from megalite.data.indexed import strip_suffix, token_dtype
from megalite.data.loss_mask import MASK_SUFFIX
from megalite.data.manifest import SUFFIX, Commit, Manifest, RangeHash, ResumeError, holds
from megalite.data.text_blocks import PIECE_BYTES, Block, Position, blocks
from megalite.data.text_sources import STDIN, Source, TextError, find_sources, same_place, total_size
from megalite.data.token_spool import Committed, TokenSpool, discard, publish
from megalite.data.tokenizer import Tokenizer, absolute_name, load_tokenizer
from megalite.data.worker_pool import encoding

__all__ = ["PIECE_BYTES", "ResumeError", "TextError", "TextOptions", "Totals", "preprocess"]

REJECTED_SUFFIX = ".rejected.jsonl"
COMMIT_BYTES = 8 << 20
"""Text between two commits: what an interruption costs at most, in each worker's time."""
_LONG_BYTES = 1 << 30
"""Text whose comparison, when a run goes on, takes seconds."""


class Progress(NamedTuple):
    """How far a run is."""

    totals: Totals
    """All that has been done, by earlier processes too."""
    disk_bytes: int
    """Bytes of input on disk that have been read."""
    total_bytes: int
    """Bytes of input on disk; 0 when that is not known."""
    at_start: tuple[int, int]
    """Bytes of text, and tokens, that earlier processes did."""


def preprocess(
    inputs: Sequence[str | Path],
    prefix: str | Path | Mapping[str, str | Path],
    tokenizer_name: str,
    *,
    options: TextOptions | None = None,
    workers: int = 1,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
    report: Callable[[str], None] | None = None,
    commit_bytes: int = COMMIT_BYTES,
) -> Totals:
    """Writes the documents of `inputs`, in order, to PREFIX.bin/.idx/.json; the result does not depend on `workers`.

    `prefix` is one for each JSON key when there are several. Beside the first, PREFIX.manifest.jsonl says what was read
    and PREFIX.rejected.jsonl holds the lines skipped. With a chat template, PREFIX_loss_mask.bin/.idx marks the tokens
    to learn. `progress` is called after each block, `report` with each line skipped and when an earlier run is
    continued: a run that was interrupted or killed, or found the disk full, goes on where it stopped when it is called
    again. (One that stops before its first commit leaves nothing behind.)

    Raises TextError for a broken text, ValueError when there is no document at all, FileExistsError without
    `overwrite`, ResumeError when an interrupted run with other settings lies there.
    """
    options = options or TextOptions()
    prefixes = prefix if isinstance(prefix, Mapping) else {options.json_keys[0]: prefix}
    assert tuple(prefixes) == options.json_keys, "a prefix for each key"
    outputs = {key: strip_suffix(p) for key, p in prefixes.items()}
    run = _Run(
        sources=find_sources(inputs),
        outputs=outputs,
        tokenizer=load_tokenizer(tokenizer_name),
        tokenizer_name=tokenizer_name,
        options=options,
        commit_bytes=commit_bytes,
        report=report or (lambda _: None),
        progress=progress or (lambda _: None),
    )
    return run(workers, overwrite)


def tokenizer_record(tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """What a side file says about the tokenizer."""
    return {
        "name": absolute_name(name),
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "special_tokens": dict(tokenizer.special_tokens),
    }


def existing_outputs(prefixes: Sequence[str]) -> list[str]:
    """Finished files that lie where the outputs are to go."""
    return [p + end for p in prefixes for end in (".bin", ".idx") if os.path.exists(p + end)]


@dataclass(frozen=True, kw_only=True)
class _Run:
    sources: list[Source]
    outputs: dict[str, str]
    """The prefix of each key."""
    tokenizer: Tokenizer
    tokenizer_name: str
    options: TextOptions
    commit_bytes: int
    report: Callable[[str], None]
    progress: Callable[[Progress], None]

    @property
    def _main(self) -> str:
        """The prefix of the files that a run has one of."""
        return next(iter(self.outputs.values()))

    @property
    def _spooled(self) -> dict[str, tuple[str, Any]]:
        """Name of each token file in the manifest: its prefix and dtype."""
        dtype = token_dtype(self.tokenizer.vocab_size)
        files = {key: (prefix, dtype) for key, prefix in self.outputs.items()}
        if self.options.chat_template:
            files |= {key + MASK_SUFFIX: (p + MASK_SUFFIX, "u1") for key, p in self.outputs.items()}
        return files

    def __call__(self, workers: int, overwrite: bool) -> Totals:
        prefixes = [prefix for prefix, _ in self._spooled.values()]
        existing = [] if overwrite else existing_outputs(prefixes)
        if existing and not was_publishing(self._main):
            raise FileExistsError(f"{existing[0]} already exists; choose another prefix or overwrite it")
        manifest = Manifest(self._main, self._settings(), restart=overwrite)
        try:
            begun = self._check_resumable(manifest, overwrite)
            totals = self._prepare(manifest, begun, workers)
        except BaseException as error:
            if isinstance(error, NoDocumentsError) or not manifest.commits:
                for prefix in prefixes:
                    discard(prefix)
                Path(self._main + REJECTED_SUFFIX + ".tmp").unlink(missing_ok=True)
                manifest.discard()
            manifest.close()
            raise
        for prefix in prefixes:
            publish(prefix)
        _publish_rejected(self._main)
        manifest.publish()
        return totals

    def _settings(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {
            "inputs": [[same_place(s), s.size] for s in self.sources],
            "outputs": {key: os.path.basename(prefix) for key, prefix in self.outputs.items()},
            "tokenizer": tokenizer_record(self.tokenizer, self.tokenizer_name),
            "options": {k: v for k, v in asdict(self.options).items() if k != "on_error"},
            "commit_bytes": self.commit_bytes,
        }

    def _prepare(self, manifest: Manifest, begun: Iterator[Block], workers: int) -> Totals:
        """Reads on from the last commit to the end, and completes the files without naming them yet.

        `begun` is the rest of the source in which the commit lies.
        """
        last = manifest.last
        totals = Totals(**last.counts)
        if last.done:
            return totals
        with contextlib.ExitStack() as stack:
            spools = {
                name: TokenSpool(prefix, dtype, Committed(*last.outputs.get(name, ())))
                for name, (prefix, dtype) in self._spooled.items()
            }
            for spool in spools.values():
                stack.callback(spool.close)
            rejected = stack.enter_context(_RejectedFile(self._main, last.rejected_bytes))
            if manifest.commits:
                self.report(f"going on after {totals.bytes_read / 1e6:.1f} MB, where an earlier run was interrupted")
            reader = _Reader(self, last.source, begun)
            writer = _Writer(self, manifest, spools, rejected, totals)
            name, options = self.tokenizer_name, self.options
            encoded = stack.enter_context(encoding(reader.blocks(), self.tokenizer, name, options, workers))
            for result in encoded:
                writer.write(result, reader.pending[0])
                if result.is_last:
                    reader.pending.popleft()
            self._complete(writer, reader.ranges.take())
        return totals

    def _check_resumable(self, manifest: Manifest, overwrite: bool) -> Iterator[Block]:
        """The rest of the source in which the last commit lies.

        ResumeError when what an earlier run read or wrote is no longer there; with `overwrite` it is forgotten. (What
        was compared with a stream could not be read again: with `overwrite` a run that read one begins again at once.)
        """
        last = manifest.last
        if not manifest.commits:
            return self.blocks(0)
        if overwrite and any(source.is_stream for source in self.sources[: last.source + 1]):
            self.report(
                "beginning again: under overwrite, standard input and pipes are not compared with what was read"
            )
            manifest.restart(self._settings())
            return self.blocks(0)
        if last.counts["bytes_read"] >= _LONG_BYTES:
            self.report(f"comparing {last.counts['bytes_read'] / 1e9:.1f} GB with what an earlier run read")
        found, begun = self._compared(manifest)
        found = found or ("" if last.done else self._lost_file(last))
        if found and not overwrite:
            raise ResumeError(f"{found} since an earlier run was interrupted; add --overwrite to begin again")
        if found:
            manifest.restart(self._settings())
            return self.blocks(0)
        return begun

    def _compared(self, manifest: Manifest) -> tuple[str, Iterator[Block]]:
        """How the text that was read differs from what is there now, and the rest of the source that was read last."""
        last, expected = manifest.last, manifest.ranges()
        begun: Iterator[Block] = iter(())
        for number in range(len(self.sources) if last.done else last.source + 1):
            begun = self.blocks(number)
            try:
                first = next(begun, None)
                if first is None:
                    continue
                if not expected:
                    return _changed(self.sources[number].path), begun
                begun = itertools.chain([first], begun)
                ranges = expected.pop(0)
                ends = last.done or number < last.source
                if not holds(begun, ranges) or (ends and next(begun, None) is not None):
                    return _changed(ranges[0]["source"]), begun
            except TextError as error:
                return f"{_changed(self.sources[number].path)} ({error})", begun
        return (_changed(expected[0][0]["source"]) if expected else ""), begun

    def blocks(self, number: int) -> Iterator[Block]:
        """The blocks of a source."""
        options = self.options
        yield from blocks(self.sources[number], Position(), options.json_keys, options.max_document_bytes)

    def _lost_file(self, last: Commit) -> str:
        for name, (prefix, dtype) in self._spooled.items():
            documents, tokens, _ = last.outputs[name]
            for end, size in ((".bin.tmp", tokens * np.dtype(dtype).itemsize), (".lengths.tmp", documents * 4)):
                path = Path(prefix + end)
                if not path.exists() or path.stat().st_size < size:
                    return f"{path} was lost"
        return ""

    def _complete(self, writer: _Writer, ranges: list[dict[str, Any]]) -> None:
        totals = writer.totals
        if not totals.tokens:
            names = ", ".join(s.path for s in self.sources)
            raise NoDocumentsError(f"no documents in {names} ({totals.blank} blank, {totals.broken} broken)")
        if ranges:  # none where an earlier process committed all that there was
            writer.commit(ranges)
        counts = {k: v for k, v in totals.as_dict().items() if v and k not in ("documents", "tokens")}
        for name, spool in writer.spools.items():
            side: dict[str, Any] = {"counts": counts}
            if name.endswith(MASK_SUFFIX) and name not in self.outputs:
                spool.complete(side)
                continue
            mask = (
                {"loss_mask": os.path.basename(self.outputs[name]) + MASK_SUFFIX} if self.options.chat_template else {}
            )
            record = tokenizer_record(self.tokenizer, self.tokenizer_name)
            spool.complete({"vocab_size": self.tokenizer.vocab_size} | side | mask | {"tokenizer": record})
        writer.commit([], done=True)


def _changed(path: str) -> str:
    return f"{'standard input' if path == STDIN else path} has changed"


class NoDocumentsError(ValueError):
    """There is nothing to write."""


@dataclass
class _Pending:
    """A block whose result is awaited."""

    number: int
    """Index of its source."""
    block: Block
    """Without its data."""
    ranges: list[dict[str, Any]]
    """What has been read since the last commit, when there is to be one after this block."""


class _Reader:
    """Cuts the sources into blocks from a commit on, and says after which to commit: a matter of the input alone."""

    def __init__(self, run: _Run, number: int, begun: Iterator[Block]):
        self._run, self._first, self._begun = run, number, begun
        self.pending = collections.deque[_Pending]()
        self.ranges = RangeHash()

    def blocks(self) -> Iterator[Block]:
        """The blocks; each is noted as pending."""
        uncommitted = 0
        for number, block in self._numbered():
            self.ranges.add(block.source, block)
            uncommitted += block.size
            is_last = uncommitted >= self._run.commit_bytes
            uncommitted = 0 if is_last else uncommitted
            self.pending.append(_Pending(number, block, self.ranges.take() if is_last else []))
            yield block

    def _numbered(self) -> Iterator[tuple[int, Block]]:
        for number in range(self._first, len(self._run.sources)):
            for block in self._begun if number == self._first else self._run.blocks(number):
                yield number, block


class _Writer:
    """Puts encoded blocks into the files, and commits now and then."""

    def __init__(
        self, run: _Run, manifest: Manifest, spools: dict[str, TokenSpool], rejected: _RejectedFile, totals: Totals
    ):
        self._run, self._manifest, self._rejected = run, manifest, rejected
        self.spools, self.totals = spools, totals
        self._at_start = totals.bytes_read, totals.tokens
        self._cut = list[list[Any]]()
        self._at = Commit(source=manifest.last.source, offset=manifest.last.offset, number=manifest.last.number)
        self._disk_total = total_size(run.sources) if all(s.size for s in run.sources) else 0

    def write(self, encoded: Encoded, pending: _Pending) -> None:
        """Appends what came of a block, or of a part of one."""
        run, block = self._run, pending.block
        for key, stream in zip(run.outputs, encoded.streams, strict=True):
            self.spools[key].add(stream.tokens, stream.lengths)
            if stream.mask is not None:
                self.spools[key + MASK_SUFFIX].add(stream.mask, stream.lengths)
        for entry in encoded.rejected:
            self._rejected.add(entry)
            run.report(f"skipped {entry.reason}")
        self.totals.add(encoded.totals)
        self._cut += map(list, encoded.cuts)
        self._at = replace(self._at, source=pending.number, offset=block.end.offset, number=block.end.number)
        if pending.ranges and encoded.is_last:
            self.commit(pending.ranges)
        before = total_size(run.sources[: pending.number])
        run.progress(Progress(self.totals, before + block.disk_position, self._disk_total, self._at_start))

    def commit(self, ranges: list[dict[str, Any]], *, done: bool = False) -> None:
        """Makes all that was written safe; `ranges` are what was read since the last commit."""
        outputs = {name: list(s.committed if done else s.commit()) for name, s in self.spools.items()}
        self._manifest.add(
            replace(
                self._at,
                outputs=outputs,
                counts=self.totals.as_dict(),
                rejected_bytes=self._rejected.commit(),
                ranges=ranges,
                cut=self._cut,
                done=done,
            )
        )
        self._cut = []


class _RejectedFile:
    """PREFIX.rejected.jsonl.tmp, made when there is something to write."""

    def __init__(self, prefix: str, size: int):
        self._path, self._size = Path(prefix + REJECTED_SUFFIX + ".tmp"), size
        if self._path.exists():
            os.truncate(self._path, size)

    def __enter__(self) -> _RejectedFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add(self, rejected: Rejected) -> None:
        with open(self._path, "ab", buffering=0) as file:
            line = memoryview(rejected.as_json())
            self._size += len(line)
            while line:
                line = line[file.write(line) :]

    def commit(self) -> int:
        """The size that is on disk."""
        if self._path.exists():
            with open(self._path, "ab") as file:
                os.fsync(file.fileno())
        return self._size


def _publish_rejected(prefix: str) -> None:
    scratch, final = Path(prefix + REJECTED_SUFFIX + ".tmp"), Path(prefix + REJECTED_SUFFIX)
    if scratch.exists() and scratch.stat().st_size:
        os.replace(scratch, final)
    else:
        scratch.unlink(missing_ok=True)
        final.unlink(missing_ok=True)


def was_publishing(prefix: str) -> bool:
    """Whether a run died while it gave its files their names."""
    try:
        *_, last = Path(prefix + SUFFIX + ".tmp").read_bytes().rstrip(b"\n").split(b"\n")
        return bool(json.loads(last).get("done"))
    except (OSError, ValueError, AttributeError):
        return False
