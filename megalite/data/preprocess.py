"""Text files to token files: reading jsonl and txt, encoding in worker processes, writing atomically."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.data.indexed import IndexedWriter, token_dtype
from megalite.data.tokenizer import Tokenizer, load_tokenizer

TEXT_SUFFIXES = (".jsonl", ".txt")
PIECE_BYTES = 64 << 10
"""A longer txt document is cut at its next blank line, so that workers, shuffle and splits have something to share."""
_BATCH_BYTES, _BATCH_PIECES = 1 << 20, 1024
_BINARY_FORMATS = {b"PAR1": "Parquet", b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
_BOM = b"\xef\xbb\xbf"


class TextError(ValueError):
    """A text that cannot be used; the message begins with file:line."""


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How texts become documents."""

    json_key: str = "text"
    """The key of the text in each line of a .jsonl file."""
    on_error: str = "fail"
    """What a broken line does: fail, or skip (counted)."""
    keep_blank: bool = False
    """Keep blank texts as Megatron does: an empty one is a document without tokens."""
    append_eod: bool = True
    """End each document with the tokenizer's end-of-document id."""


@dataclass
class Totals:
    """What has been read and written."""

    documents: int = 0
    tokens: int = 0
    bytes_read: int = 0
    blank: int = 0
    """Blank texts, left out unless keep_blank."""
    broken: int = 0
    """Lines skipped under on_error=skip."""
    replaced: int = 0
    """Lone surrogates replaced by U+FFFD."""


class Piece(NamedTuple):
    """One line of a .jsonl file, or (a part of) one document of a .txt file, still undecoded."""

    place: str
    data: bytes
    is_json: bool
    is_end: bool
    """Whether a document ends with it."""


class Encoded(NamedTuple):
    """A batch of documents as ids, and what was found on the way."""

    tokens: NDArray[Any]
    lengths: list[int]
    """Tokens of each document."""
    problems: list[str]
    blank: int
    replaced: int
    bytes_read: int


def read_pieces(path: str | Path) -> Iterator[Piece]:
    """The documents of a .jsonl (one a line) or .txt file (separated by form feeds), in order.

    Raises ValueError for other formats, recognised by their first bytes, FileNotFoundError for a missing file.
    """
    path = Path(path)
    if path.suffix not in TEXT_SUFFIXES:
        raise ValueError(f"{path}: expected a {' or '.join(TEXT_SUFFIXES)} file")
    with open(path, "rb") as file:
        head = file.peek(4)
        for magic, name in _BINARY_FORMATS.items():
            if head.startswith(magic):
                raise ValueError(f"{path} is a {name} file; unpack it to {' or '.join(TEXT_SUFFIXES)} first")
        if head.startswith(_BOM):
            file.read(len(_BOM))
        yield from _json_lines(path, file) if path.suffix == ".jsonl" else _text_pieces(path, file)


def _json_lines(path: Path, lines: Iterable[bytes]) -> Iterator[Piece]:
    for number, line in enumerate(lines, start=1):
        if not line.isspace():
            yield Piece(f"{path}:{number}", line, True, True)


def _text_pieces(path: Path, lines: Iterable[bytes]) -> Iterator[Piece]:
    """Documents between form feeds; a long one in pieces that end at a blank line with text of it to follow."""
    begin, ready, held = 1, b"", list[bytes]()
    for number, line in enumerate(lines, start=1):
        *ended, line = line.split(b"\f")
        for part in ended:
            yield Piece(f"{path}:{begin}", b"".join((ready, *held, part)), False, True)
            begin, ready, held = number, b"", []
        if ready and not line.isspace():
            yield Piece(f"{path}:{begin}", b"".join((ready, *held)), False, False)
            begin, ready, held = number, b"", []
        held.append(line)
        if line.isspace() and (ready or sum(map(len, held)) >= PIECE_BYTES):
            ready, held = b"".join((ready, *held)), []
    if ready or held:
        yield Piece(f"{path}:{begin}", b"".join((ready, *held)), False, True)


def piece_text(piece: Piece, json_key: str) -> str:
    """The text of a piece; TextError with its place when there is none."""
    try:
        text = piece.data.decode()
    except UnicodeDecodeError as error:
        raise TextError(f"{piece.place}: byte {error.start} is not UTF-8 ({error.reason})") from error
    if not piece.is_json:
        return text
    try:
        record = json.loads(text)
    except ValueError as error:
        raise TextError(f"{piece.place}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise TextError(f"{piece.place}: expected a JSON object, found {type(record).__name__}")
    if json_key not in record:
        raise TextError(f"{piece.place}: no key {json_key!r}; keys are {', '.join(map(repr, record)) or 'none'}")
    value = record[json_key]
    if not isinstance(value, str):
        raise TextError(f"{piece.place}: {json_key!r} is {type(value).__name__}, expected text")
    return value


class Encoder:
    """Turns batches of pieces into ids."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions):
        self.tokenizer, self.options = tokenizer, options
        self.dtype = token_dtype(tokenizer.vocab_size)

    def encode(self, batch: Sequence[Piece]) -> Encoded:
        """The ids of a batch; the first broken piece raises TextError under on_error=fail."""
        ids: list[int] = []
        lengths: list[int] = []
        problems: list[str] = []
        blank = replaced = 0
        for piece in batch:
            try:
                text = piece_text(piece, self.options.json_key)
            except TextError as error:
                if self.options.on_error != "skip":
                    raise
                problems.append(str(error))
                continue
            if not text or text.isspace():
                blank += 1
                if not self.options.keep_blank:
                    continue
            clean = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") if _has_surrogate(text) else text
            replaced += clean is not text
            before = len(ids)
            ids += self.tokenizer.encode(clean)
            if self.options.append_eod and piece.is_end and len(ids) > before:
                ids.append(self.tokenizer.eod)
            lengths.append(len(ids) - before)
        tokens = np.array(ids, dtype=self.dtype)
        return Encoded(tokens, lengths, problems, blank, replaced, sum(len(p.data) for p in batch))


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def preprocess(
    inputs: Sequence[str | Path],
    prefix: str | Path,
    tokenizer_name: str,
    *,
    options: TextOptions | None = None,
    workers: int = 1,
    overwrite: bool = False,
    progress: Callable[[Totals], None] | None = None,
    report: Callable[[str], None] | None = None,
) -> Totals:
    """Writes the documents of `inputs`, in order, to PREFIX.bin/.idx/.json; the result does not depend on `workers`.

    `progress` is called after each batch, `report` with each line skipped. Nothing is left behind on failure. Raises
    TextError for a broken text, ValueError when there is no document at all, FileExistsError without `overwrite`.
    """
    options = options or TextOptions()
    tokenizer = load_tokenizer(tokenizer_name)
    totals = Totals()
    writer = IndexedWriter(
        prefix, dtype=token_dtype(tokenizer.vocab_size), vocab_size=tokenizer.vocab_size, overwrite=overwrite
    )
    try:
        pieces = (piece for path in inputs for piece in read_pieces(path))
        with _encoded(_batches(pieces), tokenizer, tokenizer_name, options, workers) as results:
            for encoded in results:
                _write(writer, encoded, totals)
                if report:
                    for problem in encoded.problems:
                        report(problem)
                if progress:
                    progress(totals)
        if not totals.tokens:
            names = ", ".join(map(str, inputs))
            raise ValueError(f"no documents in {names} ({totals.blank} blank, {totals.broken} broken)")
        writer.finish(tokenizer=tokenizer_record(tokenizer, tokenizer_name))
    except BaseException:
        writer.abort()
        raise
    return totals


def tokenizer_record(tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """What a side file says about the tokenizer."""
    place = name if name == "byte" else os.path.abspath(name)
    return {
        "name": place,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }


def _write(writer: IndexedWriter, encoded: Encoded, totals: Totals) -> None:
    lengths = [n for n in encoded.lengths if n]
    writer.add_documents(encoded.tokens, lengths, [int(n > 0) for n in encoded.lengths])
    totals.documents, totals.tokens = writer.num_documents, writer.num_tokens
    totals.bytes_read += encoded.bytes_read
    totals.blank += encoded.blank
    totals.broken += len(encoded.problems)
    totals.replaced += encoded.replaced


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.data)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _encoded(
    batches: Iterable[list[Piece]], tokenizer: Tokenizer, name: str, options: TextOptions, workers: int
) -> Iterator[Iterator[Encoded]]:
    """The encoded batches in order, by `workers` processes (1: by this one)."""
    if workers == 1:
        yield map(Encoder(tokenizer, options).encode, batches)
        return
    pool = WorkerPool()
    try:
        pool.start(workers, name, options)
        yield pool.encode(batches)
    finally:
        pool.stop()


class WorkerPool:
    """Encoding processes with a connection each, so that one that dies, at whatever moment, is an error and no wait.

    (A shared result queue, as executors have, is blocked for good when a process is killed while writing to it.)
    """

    def __init__(self) -> None:
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection[Any, Any]] = []

    def start(self, count: int, tokenizer_name: str, options: TextOptions) -> None:
        """Starts the processes; each loads the tokenizer itself."""
        context = multiprocessing.get_context("spawn")
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, tokenizer_name, options), daemon=True)
            self._connections.append(ours)
            process.start()
            self._processes.append(process)
            theirs.close()  # the worker holds the only other end: its death closes it

    def encode(self, batches: Iterable[list[Piece]]) -> Iterator[Encoded]:
        """Results in input order; worker k takes every count-th batch, and has at most one waiting.

        Raises what the encoder raised, and RuntimeError when a worker died.
        """
        sent = received = 0
        for batch in batches:
            with self._alive(sent) as connection:
                connection.send(batch)
            sent += 1
            if sent - received == 2 * len(self._processes):
                yield self._receive(received)
                received += 1
        for number in range(received, sent):
            yield self._receive(number)

    def _receive(self, number: int) -> Encoded:
        with self._alive(number) as connection:
            result = connection.recv()
        if isinstance(result, Exception):
            raise result
        return result

    @contextlib.contextmanager
    def _alive(self, number: int) -> Iterator[Connection[Any, Any]]:
        worker = number % len(self._processes)
        try:
            yield self._connections[worker]
        except (EOFError, OSError) as error:
            process = self._processes[worker]
            process.join(1.0)
            raise RuntimeError(f"worker {worker} died with exit code {process.exitcode}") from error

    def stop(self) -> None:
        """Ends all processes, busy or not."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()


def _work(connection: Connection[Any, Any], tokenizer_name: str, options: TextOptions) -> None:
    """The main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    batches: queue.Queue[list[Piece]] = queue.Queue()
    # Taking batches in apart from encoding keeps the parent's send from waiting for our own send.
    threading.Thread(target=_take_in, args=(connection, batches), daemon=True).start()
    encoder = Encoder(load_tokenizer(tokenizer_name), options)
    while True:
        batch = batches.get()
        try:
            result: Encoded | Exception = encoder.encode(batch)
        except TextError as error:
            result = error
        except Exception as error:  # whatever it is, the parent must hear of it, and it may not pickle
            result = RuntimeError(f"{type(error).__name__} near {batch[0].place}: {error}")
        connection.send(result)


def _take_in(connection: Connection[Any, Any], batches: queue.Queue[list[Piece]]) -> None:
    try:
        while True:
            batches.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)  # the parent is gone
