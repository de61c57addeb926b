"""How jobs end: real torchrun jobs in which a rank raises, hangs, is killed, or somebody sends a signal."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megalite.axis import LastCall
from megalite.mpu import ParallelState
from megalite.train.distributed import start
from megalite.train.failure import Board, StopRequest, Watchdog, lost_peer, summarize_calls

JOB = Path(__file__).with_name("failing_job.py")
ROOT = JOB.parents[2]


def _torchrun(how: str, run_dir: Path, *options: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(JOB), how, str(run_dir)]
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def _finish(job: subprocess.Popen[str], run_dir: Path, alone: bool = True) -> str:
    """The job's output, once it has ended by itself; no process of the run is left if this was all of it."""
    try:
        output, _ = job.communicate(timeout=120)
    finally:
        job.kill()
    if alone:
        left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if _mentions(p, str(run_dir))]
        assert left == [], output
    return output


def _mentions(cmdline: Path, text: str) -> bool:
    try:
        return text.encode() in cmdline.read_bytes()
    except OSError:
        return False


def test_a_rank_that_raises_ends_the_job_with_its_traceback_first(tmp_path: Path) -> None:
    job = _torchrun("raise", tmp_path, "--nproc-per-node", "4")
    output = _finish(job, tmp_path)
    assert job.returncode != 0
    first, _, second, *_ = output.splitlines()
    assert first == "[rank 1] raised, and ends the job of 4 ranks:"
    assert "failing_job.py" in second, "the frames of the context managers are left out"
    own = output.index("ValueError: the true reason")
    for rank in (0, 2, 3):
        line = f"[rank {rank}] stopped because rank 1 raised: ValueError: the true reason"
        assert output.count(f"[rank {rank}]") == output.count(line) <= 1
        assert output.find(line) == -1 or output.index(line) > own
    assert "onnection" not in output, "the lost connections that follow are not worth a word"
    root_cause = output[output.index("Root Cause") :]
    assert "rank      : 1" in root_cause and "the true reason" in root_cause


@pytest.mark.full
def test_an_error_that_all_ranks_share_is_told_once(tmp_path: Path) -> None:
    job = _torchrun("all_raise", tmp_path, "--nproc-per-node", "2")
    output = _finish(job, tmp_path)
    assert job.returncode != 0
    launcher = output.index("failed (exitcode")
    assert output[:launcher].count("Traceback") == 1


def test_a_hang_is_found_and_every_rank_reports(tmp_path: Path) -> None:
    job = _torchrun("hang", tmp_path, "--nproc-per-node", "4")
    output = _finish(job, tmp_path)
    assert job.returncode != 0
    reports = [(tmp_path / "hang" / f"rank_{rank:05d}.txt").read_text() for rank in range(4)]
    assert "last collective: all_reduce on axis tp from __main__.training (waiting" in reports[0]
    assert "(finished)" in reports[1] and "time.sleep(3600)" in reports[1]
    assert all("last collective: all_reduce on axis dp from __main__.training (waiting" in r for r in reports[2:])
    assert all("in step 3" in report for report in reports)
    assert "the job hangs: rank" in output
    assert "waiting in all_reduce on axis dp from __main__.training: ranks 2, 3" in output
    assert "running outside of any collective: ranks 1" in output


@pytest.mark.full
def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    job = _torchrun("kill", tmp_path, "--nproc-per-node", "2")
    output = _finish(job, tmp_path)
    assert job.returncode != 0
    assert "[rank 0] raised, and ends the job of 2 ranks:" in output
    assert "No rank has told of an error before: one was killed" in output


@pytest.mark.full
def test_a_signal_to_one_rank_stops_all_in_order(tmp_path: Path) -> None:
    job = _torchrun("term", tmp_path, "--nproc-per-node", "2")
    output = _finish(job, tmp_path)
    assert job.returncode == 0, output
    for rank in range(2):
        assert f"rank {rank} saves at step 3 because of SIGTERM" in output
        assert f"rank {rank} of 2 ends in order" in output


def test_an_interrupt_from_the_terminal_lets_all_ranks_save(tmp_path: Path) -> None:
    """Ctrl-C reaches the launcher and the ranks, and the launcher then repeats it to the ranks."""
    job = _torchrun("none", tmp_path, "--nproc-per-node", "2")
    started = tmp_path / "rank_1"
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        if _mentions(cmdline, str(tmp_path)):
            os.kill(int(cmdline.parent.name), signal.SIGINT)
    output = _finish(job, tmp_path)
    for rank in range(2):
        assert f"rank {rank} saves at step" in output
        assert f"rank {rank} of 2 ends in order" in output


def _two_agents(how: str, run_dir: Path, rendezvous: str) -> list[subprocess.Popen[str]]:
    """Two agents of two ranks each, as on two nodes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--nnodes", "2", "--nproc-per-node", "2"]
    if rendezvous == "c10d":
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "test"]
        return [_torchrun(how, run_dir, *options) for _ in range(2)]
    options += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [_torchrun(how, run_dir, *options, "--node-rank", str(node)) for node in range(2)]


@pytest.mark.parametrize("rendezvous", ["static", pytest.param("c10d", marks=pytest.mark.full)])
def test_two_nodes(tmp_path: Path, rendezvous: str) -> None:
    jobs = _two_agents("done", tmp_path, rendezvous)
    outputs = [_finish(job, tmp_path, alone=False) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    for rank in range(4):
        assert f"rank {rank} of 4 ends in order; 2 on its node" in "".join(outputs)
        # One that is late in letting go of a tensor would end the process with SIGABRT.
        assert f"rank {rank} has 0 threads of gloo left" in "".join(outputs)


@pytest.mark.full
def test_a_failure_on_one_node_ends_the_other(tmp_path: Path) -> None:
    jobs = _two_agents("raise", tmp_path, "static")
    outputs = [_finish(job, tmp_path, alone=node == 1) for node, job in enumerate(jobs)]
    assert all(job.returncode != 0 for job in jobs)
    assert outputs[0].startswith("[rank 1] raised, and ends the job of 4 ranks:")
    assert "[rank 2] stopped because rank 1 raised: ValueError: the true reason" in outputs[1]


def test_a_single_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(KeyError, match="mine"), start("cpu") as launch:
        assert (launch.rank, launch.world_size, launch.ranks_per_node) == (0, 1, 1)
        assert launch.device == torch.device("cpu")
        raise KeyError("mine")


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RuntimeError, match=r"MASTER_ADDR.*torchrun"), start("cpu"):
        pass


def test_a_hang_of_a_single_process_is_reported(tmp_path: Path) -> None:
    script = (
        "import time, sys\n"
        "from megalite.mpu import ParallelState\n"
        "from megalite.train.distributed import start\n"
        "with start('cpu') as launch:\n"
        f"    launch.watchdog.watch(ParallelState.single(), 1.0, {str(tmp_path)!r})\n"
        "    launch.watchdog.heartbeat(7)\n"
        "    time.sleep(3600)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert "the job hangs: rank 0 made no progress" in run.stderr
    assert "in step 7" in (tmp_path / "hang" / "rank_00000.txt").read_text()


def test_the_first_failure_is_the_jobs() -> None:
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    boards = [Board(store, rank, 2) for rank in range(2)]
    assert boards[0].first() is None
    assert boards[1].post("raised", "ValueError: a").rank == 1
    assert str(boards[0].post("hung", "made no progress")) == "rank 1 raised: ValueError: a"
    call = LastCall()
    call.enter("tp", "all_gather", "here")
    boards[0].note_call(call)
    assert boards[1].calls() == {0: "all_gather on axis tp from here"}


def test_a_watchdog_that_is_fed_stays_quiet() -> None:
    with Watchdog(Board()) as watchdog:
        watchdog.watch(ParallelState.single(), 0.5, None)
        for step in range(10):
            time.sleep(0.1)
            watchdog.heartbeat(step)
        watchdog.watch(ParallelState.single(), 0.0, None)


def test_stop_request_restores_the_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    world = ParallelState.single().world
    with StopRequest() as stop:
        assert stop.agreed(world) is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(world) == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_counts_as_a_lost_peer() -> None:
    assert lost_peer(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:10164"))
    assert not lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost_peer(ValueError("connection reset"))


def test_summary_of_calls() -> None:
    assert summarize_calls({2: "send on axis pp from f", 0: None, 1: "send on axis pp from f"}) == [
        "waiting in send on axis pp from f: ranks 1, 2",
        "running outside of any collective: ranks 0",
    ]
