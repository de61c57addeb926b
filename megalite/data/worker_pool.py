"""Processes that encode blocks of text."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from megalite.data.encoder import Encoded, Encoder, TextOptions
from megalite.data.text_blocks import Block
from megalite.data.text_sources import TextError
from megalite.data.tokenizer import Tokenizer, load_tokenizer


@contextlib.contextmanager
def encoding(
    blocks: Iterable[Block], tokenizer: Tokenizer, name: str, options: TextOptions, workers: int
) -> Iterator[Iterator[Encoded]]:
    """The encoded blocks in order, by `workers` processes (1: by this one)."""
    if workers == 1:
        yield itertools.chain.from_iterable(map(Encoder(tokenizer, options).encode, blocks))
        return
    pool = WorkerPool()
    try:
        pool.start(workers, name, options)
        yield pool.encode(blocks)
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

    def encode(self, blocks: Iterable[Block]) -> Iterator[Encoded]:
        """Results in input order; worker k takes every count-th block, and has at most one waiting.

        Raises what the encoder raised, and RuntimeError when a worker died.
        """
        sent = received = 0
        for block in blocks:
            with self._alive(sent) as connection:
                data, block.data = block.data, b""
                connection.send(block)
                connection.send_bytes(data)  # as it is: pickled, a long line would be held twice
            del data
            sent += 1
            if sent - received == 2 * len(self._processes):
                yield from self._receive(received)
                received += 1
        for number in range(received, sent):
            yield from self._receive(number)

    def _receive(self, number: int) -> Iterator[Encoded]:
        """The parts of block `number`."""
        is_last = False
        while not is_last:
            with self._alive(number) as connection:
                result = connection.recv()
            if isinstance(result, Exception):
                raise result
            is_last = result.is_last
            yield result

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
    blocks: queue.Queue[Block] = queue.Queue()
    # Taking blocks in apart from encoding keeps the parent's send from waiting for our own send.
    threading.Thread(target=_take_in, args=(connection, blocks), daemon=True).start()
    encoder = Encoder(load_tokenizer(tokenizer_name), options)
    while True:
        block = blocks.get()
        try:
            for part in encoder.encode(block):
                connection.send(part)
        except (BrokenPipeError, ConnectionError):
            os._exit(1)  # the parent is gone
        except TextError as error:
            connection.send(error)
        except Exception as error:  # whatever it is, the parent must hear of it, and it may not pickle
            connection.send(RuntimeError(f"{type(error).__name__} near {block.source}:{block.begin.number}: {error}"))
        del block


def _take_in(connection: Connection[Any, Any], blocks: queue.Queue[Block]) -> None:
    try:
        while True:
            block = connection.recv()
            block.data = connection.recv_bytes()
            blocks.put(block)
            del block
    except (EOFError, OSError):
        os._exit(1)  # the parent is gone
