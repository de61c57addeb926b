"""A job for torchrun that goes wrong as its argument says; run by test_failure.py, not a test itself."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megalite.mpu import ParallelConfig, ParallelState
from megalite.train.distributed import start
from megalite.train.failure import StopRequest


def training(mpu: ParallelState, on_step: str, stop: StopRequest, heartbeat: Callable[[int], None]) -> None:
    for step in range(10_000):
        heartbeat(step)
        if step == 3 and mpu.rank == 1:
            go_wrong(on_step)
        if step == 3 and on_step == "all_raise":
            raise ValueError("everybody has the same bad config")
        total = mpu.tp.all_reduce(torch.ones(2))
        mpu.dp.all_reduce(total)
        if step == 3 and on_step == "done":
            return
        if (name := stop.agreed(mpu.world)) is not None:
            print(f"rank {mpu.rank} saves at step {step} because of {name}", flush=True)
            return
        time.sleep(0.02)


def go_wrong(how: str) -> None:
    if how == "raise":
        raise ValueError("the true reason")
    if how == "exit":
        sys.exit("left early")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(3600)
    if how == "term":
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    how, run_dir = sys.argv[1:]
    with start("cpu") as launch:
        mpu = ParallelState.build(ParallelConfig(tp=2 if launch.world_size > 1 else 1))
        launch.watchdog.watch(mpu, 4.0 if how == "hang" else 100.0, run_dir)
        with StopRequest() as stop:
            Path(run_dir, f"rank_{launch.rank}").touch()
            training(mpu, how, stop, launch.watchdog.heartbeat)
        print(
            f"rank {launch.rank} of {launch.world_size} ends in order; {launch.ranks_per_node} on its node", flush=True
        )
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    print(f"rank {mpu.rank} has {sum('gloo' in name for name in names)} threads of gloo left", flush=True)


if __name__ == "__main__":
    main()
