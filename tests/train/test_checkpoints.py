"""What a run keeps of its state, and when a checkpoint may be continued."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor, nn

from megalite.checkpoint import store
from megalite.checkpoint.config import CheckpointConfig
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.reshard import resharded, weights_state
from megalite.checkpoint.rewrite import cut_evenly, write_checkpoint
from megalite.checkpoint.stored import StoredCheckpoint
from megalite.data.config import DataConfig
from megalite.mpu import ParallelState
from megalite.optim.config import OptimConfig
from megalite.optim.optimizer import Optimizer
from megalite.parallel.data import DataParallel, Unit, main_grad
from megalite.parallel.shard import buffer_tensors, name_parameters
from megalite.parallel.wgrad import WeightGradQueue
from megalite.train.checkpoints import ResumeError, RunCheckpoints
from megalite.train.config import TrainConfig
from megalite.train.step import Training
from tests.train.fakes import FakeConfig


def make(
    run_dir: Path, *, resume: str = "none", load: str | None = None, seed: int = 1, batch: int = 4, data: str = "d",
    num_steps: int = 9, master_weights: Literal["fp32", "none"] = "fp32",
):  # fmt: skip
    """A bf16 linear layer under AdamW, so that there are master weights and moments, and its checkpoints."""
    mpu = ParallelState.single()
    torch.manual_seed(0)
    layer = nn.Linear(5, 3, dtype=torch.bfloat16)
    layer.register_buffer("moved", torch.zeros(3))
    layer.register_buffer("scratch", torch.zeros(3), persistent=False)
    name_parameters(layer)
    data_parallel = DataParallel([Unit("layer", list(layer.parameters()))], mpu, queue=WeightGradQueue())
    optimizer = Optimizer(OptimConfig(weight_decay=0.1, master_weights=master_weights), [data_parallel], mpu)
    training = SimpleNamespace(
        mpu=mpu, stages={0: layer}, data_parallels={0: data_parallel}, optimizer=optimizer, layer=layer,
        datasets=SimpleNamespace(fingerprint=data, orders=(num_steps * batch,)), num_skipped=0, skipped_samples=0,
    )  # fmt: skip
    config = FakeConfig(
        TrainConfig(seed=seed, global_batch_size=batch, resume=resume, num_steps=num_steps),
        CheckpointConfig(load=load),
        data=DataConfig(),
    )
    return RunCheckpoints(config, cast(Training, training), run_dir), training


def train(training: Any, steps: range) -> None:
    for step in steps:
        for i, parameter in enumerate(training.layer.parameters()):
            main_grad(parameter).copy_(torch.arange(parameter.numel()).view(parameter.shape) % (step + 2) - i)
        training.optimizer.step(0.01)
        training.layer.moved += step / 7


def everything(training: Any) -> dict[str, list[Tensor]]:
    tensors = {
        **training.data_parallels[0].state_tensors(),
        **training.optimizer.state_tensors(),
        **buffer_tensors(training.layer),
    }
    return {kind: [tensor.clone() for _, tensor in of_kind] for kind, of_kind in tensors.items()}


def assert_equal(a: Any, b: Any) -> None:
    first, second = everything(a), everything(b)
    assert first.keys() == second.keys() and {"parameter", "master", "buffer"} < first.keys()
    for kind, tensors in first.items():
        assert all(torch.equal(x, y) for x, y in zip(tensors, second[kind], strict=True)), kind
    assert a.optimizer.steps == b.optimizer.steps


def test_a_resumed_run_is_bit_equal_to_one_that_was_never_interrupted(tmp_path: Path) -> None:
    _, whole = make(tmp_path)
    train(whole, range(5))
    checkpoints, first = make(tmp_path)
    train(first, range(3))
    checkpoints.save(3)
    again, second = make(tmp_path, resume="auto")
    train(second, range(1))  # whatever it was before
    path = again.find()
    assert path is not None and path == tmp_path / "checkpoints/step_00000003"
    assert again.load(path) == 3
    assert_equal(first, second)
    train(second, range(3, 5))
    assert_equal(whole, second)


def test_resume_none_and_auto_without_a_checkpoint_begin_at_step_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path)[0].save(3)
    assert make(tmp_path)[0].find() is None
    assert caplog.text == ""
    assert make(tmp_path / "empty", resume="auto")[0].find() is None
    assert "no checkpoint to resume from: starting at step 0" in caplog.text


def test_auto_finds_a_complete_checkpoint_whose_pointer_was_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(tmp_path)[0].save(3)
    (tmp_path / "checkpoints/latest").unlink()
    assert make(tmp_path, resume="auto")[0].find() == path
    assert "has no `latest`" in caplog.text


def test_auto_does_not_pass_over_a_pointer_to_nothing(tmp_path: Path) -> None:
    shutil.rmtree(make(tmp_path)[0].save(3))
    with pytest.raises(CheckpointError, match="step_00000003, which is not there"):
        make(tmp_path, resume="auto")[0].find()


def test_a_named_checkpoint_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    checkpoints, _ = make(tmp_path, resume=str(tmp_path / "step_00000009"))
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        checkpoints.find()


@pytest.mark.parametrize("changed", [{"seed": 2}, {"batch": 8}, {"data": "e"}])
def test_another_seed_batch_or_corpus_cannot_continue_a_run(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = make(tmp_path)[0].save(3)
    with pytest.raises(ResumeError, match=r"there, .* here.*--checkpoint.load"):
        make(tmp_path, resume="auto", **changed)[0].load(path)


@pytest.mark.parametrize("updates", [None, "3", True])
def test_a_checkpoint_without_the_run_s_counters_is_refused(tmp_path: Path, updates: Any) -> None:
    path = Path(make(tmp_path)[0].save(3))
    content = json.loads((path / "manifest.json").read_text())
    content["state"]["updates"] = updates
    (path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ResumeError, match="does not say how many updates"):
        make(tmp_path, resume="auto")[0].load(path)


def test_a_new_run_takes_over_the_state_of_another_one(tmp_path: Path) -> None:
    checkpoints, old = make(tmp_path / "old")
    train(old, range(3))
    checkpoints.save(3)
    fresh, new = make(tmp_path / "new", load=str(tmp_path / "old"), seed=2, batch=8)
    assert fresh.find() is None and fresh.load_start() == str(tmp_path / "old")
    assert_equal(old, new)
    assert make(tmp_path / "new")[0].load_start() is None


def test_master_weights_may_go_and_come(tmp_path: Path) -> None:
    checkpoints, first = make(tmp_path / "masters")
    train(first, range(3))
    saved = checkpoints.save(3)
    without, second = make(tmp_path / "none", master_weights="none")
    without.load(saved)
    kept = everything(first)
    assert kept.pop("master") and all(
        torch.equal(a, b)
        for kind, tensors in everything(second).items()
        for a, b in zip(kept[kind], tensors, strict=True)
    )
    train(second, range(3, 5))
    back, third = make(tmp_path / "back")
    back.load(without.save(5))
    found, expected = everything(third), everything(second)
    for weight, master in zip(expected["parameter"], found["master"], strict=True):
        assert master.dtype == torch.float32 and torch.equal(weight.float(), master)
    assert all(torch.equal(a, b) for a, b in zip(found["exp_avg_sq"], expected["exp_avg_sq"], strict=True))
    assert third.optimizer.steps == 5


def test_other_state_may_not_be_missing(tmp_path: Path) -> None:
    checkpoints, training = make(tmp_path)
    tensors = {"parameter": training.data_parallels[0].state_tensors()["parameter"]}
    tensors |= buffer_tensors(training.layer)
    folder = store.save(tmp_path, 1, tensors, {"updates": 1}, training.mpu)
    with pytest.raises(CheckpointError, match=r"exp_avg.* is not in the checkpoint"):
        checkpoints.load(folder)


def test_weights_alone_start_a_run_with_a_fresh_optimizer(tmp_path: Path) -> None:
    """Means and imports have no moments; a resumed run must have them."""
    checkpoints, old = make(tmp_path / "old")
    train(old, range(3))
    checkpoints.save(3)
    with StoredCheckpoint(tmp_path / "old") as source:
        for name, tensors in (
            ("weights", resharded(source, weights_only=True)),
            ("rounded", [tensor for tensor in resharded(source) if tensor.key.startswith("parameter/")]),
        ):
            state = weights_state(source.manifest.state)
            write_checkpoint(tmp_path / name, 3, tensors, cut_evenly(tensors, 2), state=state, layout={})
    _, untouched = make(tmp_path / "untouched")
    before = everything(untouched)
    for name in ("weights", "rounded"):
        fresh, new = make(tmp_path / f"from_{name}", load=str(tmp_path / name))
        assert fresh.load_start() == str(tmp_path / name) and new.optimizer.steps == 0
        found, trained = everything(new), everything(old)
        masters = trained["master"] if name == "weights" else [tensor.float() for tensor in trained["parameter"]]
        expected = before | {"parameter": trained["parameter"], "master": masters}
        expected |= {"buffer": trained["buffer"]} if name == "weights" else {}
        for kind, tensors in expected.items():
            assert all(torch.equal(x, y) for x, y in zip(found[kind], tensors, strict=True)), (name, kind)
    again, _ = make(tmp_path / "weights", resume="auto")
    path = again.find()
    with pytest.raises(CheckpointError, match=r"exp_avg/.* is not in the checkpoint"):
        again.load(path or "")
