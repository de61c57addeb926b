"""Start and orderly end of a process of a job: device, threads and torch.distributed from torchrun's variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megalite.train.failure import Board, Store, Watchdog, abort_on_error


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process's place on the machines, and what stops it when another rank fails."""

    rank: int = 0
    """Rank in the job."""
    world_size: int = 1
    """Ranks of the job."""
    local_rank: int = 0
    """Rank on this node."""
    ranks_per_node: int = 1
    """Ranks on this node."""
    device: torch.device
    """Where this rank computes."""
    board: Board
    """Where ranks tell of failures."""
    watchdog: Watchdog
    """Ends this process when another rank has failed; `watchdog.watch` looks for hangs, too."""


@contextlib.contextmanager
def start(device: str = "auto", *, timeout_seconds: float = 1800.0) -> Iterator[Launch]:
    """Joins the job that torchrun describes (a single process without it) and leaves it in order.

    device: `cpu` (gloo), `cuda` (NCCL, one GPU a rank) or `auto`. timeout_seconds: the limit of a collective; let the
    watchdog's be shorter, its report says more. If the body raises on one rank, all ranks end within seconds.
    """
    place = _place(os.environ)
    where = _device(device, place["local_rank"], place["ranks_per_node"])
    _share_cores(place["ranks_per_node"])
    if place["world_size"] > 1:
        backend = "nccl" if where.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    board = Board(_board_store(), place["rank"], place["world_size"])
    with Watchdog(board) as watchdog, abort_on_error(board):
        yield Launch(**place, device=where, board=board, watchdog=watchdog)
        if dist.is_initialized():
            # Nobody closes connections while a peer still works.
            dist.barrier(device_ids=[place["local_rank"]] if where.type == "cuda" else None)
            dist.destroy_process_group()


def _place(env: Mapping[str, str]) -> dict[str, int]:
    """rank, world_size, local_rank and ranks_per_node as torchrun tells them; one process without it."""
    if "RANK" not in env:
        return {"rank": 0, "world_size": 1, "local_rank": 0, "ranks_per_node": 1}
    needed = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in env]:
        raise RuntimeError(f"RANK is set but {', '.join(missing)} not: start several ranks with torchrun")
    return {
        "rank": int(env["RANK"]),
        "world_size": int(env["WORLD_SIZE"]),
        "local_rank": int(env["LOCAL_RANK"]),
        "ranks_per_node": int(env["LOCAL_WORLD_SIZE"]),
    }


def device_type(device: str) -> str:
    """What `train.device` means on this machine: cpu or cuda."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _device(device: str, local_rank: int, ranks_per_node: int) -> torch.device:
    """The device of this rank; RuntimeError when the node has too few GPUs."""
    if device_type(device) == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if ranks_per_node > found:
        raise RuntimeError(
            f"{ranks_per_node} ranks on a node with {found} GPUs: start at most {found} with --nproc-per-node,"
            " or use --train.device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _share_cores(ranks_per_node: int) -> None:
    """Divides the cores among the ranks of a node, unless OMP_NUM_THREADS (torchrun sets it) has spoken."""
    if ranks_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // ranks_per_node))


def _board_store() -> Store | None:
    """A connection of its own to the job's store: the watchdog's thread must not wait for the main thread's."""
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]
