"""Processes that measure one contender and take turns with those of others, a request at a time."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

import torch
from torch import distributed as dist

Make = Callable[..., Any]
"""What makes a process's part of a contender; a request is the name of one of its methods."""


class Team:
    """The running processes of a contender, `ranks` of them joined by gloo, with `threads` each.

    In every process `make(*arguments)` is called once; `ask` calls a method of what it returned. A context manager; an
    error in a process is raised here as RuntimeError, with its stack.
    """

    def __init__(
        self,
        name: str,
        make: Make,
        *arguments: Any,
        ranks: int,
        threads: int,
        context: SpawnContext | ForkServerContext | None = None,
    ):
        self.name, self._failed = name, False
        context = context if context is not None else multiprocessing.get_context("spawn")
        _prepare(ranks, threads)
        port, self._pipes, self._processes = _free_port(), [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(make, arguments, rank, ranks, threads, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Team:
        try:
            self._collect()
        except RuntimeError:
            self.__exit__(None)
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        at_once = kind is not None or self._failed
        for pipe in self._pipes if not at_once else ():
            pipe.send(None)
        for process in self._processes:
            if at_once:
                process.terminate()
            process.join()

    def ask(self, request: str) -> list[Any]:
        """The answers of all ranks."""
        for pipe in self._pipes:
            pipe.send(request)
        return self._collect()

    def _collect(self) -> list[Any]:
        answers = []
        for pipe in self._pipes:
            try:
                answer, error = pipe.recv()
            except EOFError:
                answer, error = None, "its process ended"
            if error is not None:
                self._failed = True
                raise RuntimeError(f"{self.name}: {error}")
            answers.append(answer)
        return answers


def _prepare(ranks: int, threads: int) -> None:
    """Sets what OpenMP reads when a child loads it.

    Idle threads must leave the cores to the other contenders: never ACTIVE, which spins for ever; without a policy
    they spin for about a millisecond.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.pop("OMP_WAIT_POLICY", None)
    if ranks > 1:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def _serve(
    make: Make, arguments: Sequence[Any], rank: int, ranks: int, threads: int, port: int, pipe: Connection
) -> None:
    """The body of a process: an answer to each request, until there is none."""
    try:
        torch.set_num_threads(threads)
        if ranks > 1:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        member = make(*arguments)
        pipe.send((None, None))
        while (request := pipe.recv()) is not None:
            pipe.send((getattr(member, request)(), None))
        if ranks > 1:
            dist.barrier()
            dist.destroy_process_group()
    except Exception:
        pipe.send((None, traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
