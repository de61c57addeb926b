"""What the training loop is told: how long, how large a batch, in which precision, and what to watch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megalite.data.batch_sizes import BatchSizes
from megalite.nn.recompute import recompute_problem

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run itself."""

    run_dir: str | None = None
    """Folder of the run (metrics, checkpoints, log); by default runs/<name of the first config>, or runs/default."""
    seed: int = 1234
    """The one seed: initial weights, data order and dropout follow from it, whatever the layout."""
    num_steps: int = 1000
    """Optimizer steps in all, over every resume."""
    global_batch_size: int = 32
    """Rows in an optimizer step, over all data-parallel ranks and micro-batches."""
    batch_ramp: tuple[int, int, int] | None = None
    """Begin with smaller batches: start, increment, samples. The batch grows from start to global_batch_size by the
    increment, in equal parts of so many samples (--rampup-batch-size of Megatron-LM)."""
    micro_batch_size: int = 2
    """Rows that go through the model at once; changes memory and speed, never the result."""
    precision: Literal["fp32", "bf16", "fp16", "fp64", "fp8"] = "fp32"
    """Arithmetic of the model. bf16 and fp16 keep float32 master weights and gradients (optim.master_weights), fp16 has
    a dynamic loss scale, fp64 is for proofs. fp8 is reserved."""
    reduce_dtype: Literal["main", "bf16"] = "main"
    """What gradients are summed in over data-parallel ranks: main (float32, or float64 under fp64) or bf16."""
    sequence_chunk: int = 0
    """Tokens that a feed-forward layer works on at once, computed again in backward; 0 is all of a micro-batch. Experts
    are not cut. Fewer tokens hold less memory at long seq_len; changes nothing else."""
    recompute: str = "none"
    """What backward computes again instead of keeping: none, full (each layer from its input), every:K (K layers from
    one input), block:N (full, but for the first N layers of a pipeline stage only), selective (attention), or
    selective: with some of attention,mlp,norm. Changes memory and speed, never a bit of the result."""
    recompute_stash: bool = False
    """Keep the results of sums and exchanges between ranks: what is computed again is not communicated again."""
    recompute_cut_input: bool = False
    """Without parallel.sequence_parallel, keep on each tensor-parallel rank only its part of the inputs from which
    backward computes again, and gather them then."""
    resume: str = "none"
    """Continue a run: none (a non-empty run folder is refused), auto (its latest checkpoint if there is one),
    or a checkpoint folder."""
    freeze: tuple[str, ...] = ()
    """Parameters that do not learn: patterns of their names as in a shell (embedding.*, layers.0.*). They have neither
    gradients nor optimizer state, and stay whole under ZeRO."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes CUDA when it is there."""
    log_every: int = 1
    """Steps between lines on the terminal; metrics.jsonl gets every step."""
    eval_every: int = 0
    """Steps between evaluations on the validation split; 0 is never. Evaluation changes nothing in training."""
    eval_steps: int = 10
    """Global batches of an evaluation."""
    eval_only: bool = False
    """Load the weights, evaluate once, print the loss and stop."""
    hang_seconds: float = 600.0
    """A rank without progress for so long is reported with its last collective and its stack, and the job ends;
    0 is off."""
    profile_steps: tuple[int, int] | None = None
    """First and last step of a profiler trace, written into the run folder."""
    trace_pipeline: bool = False
    """Write what each pipeline action took in steps 2 to 4 into pipeline_trace.jsonl of the run folder
    (show_schedule.py --measured draws it)."""
    peak_tflops: float | None = None
    """Peak dense TFLOP/s of one device in this precision, for MFU; looked up by name for GPUs that are known."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    router_every: int = 1
    """Steps between rows of router.jsonl, the tokens of each expert (mixture of experts only)."""
    dead_expert_steps: int = 50
    """Steps without a token after which an expert is reported as dead; 0 is never."""
    record_router: tuple[int, ...] = ()
    """Steps of which the router logits are written into router_logits of the run folder (tools/route_lab.py replays
    them)."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's parameters and activations."""
        return _DTYPES[self.precision]

    @property
    def batch_sizes(self) -> BatchSizes:
        """Samples of every global batch."""
        return BatchSizes(final=self.global_batch_size, ramp=self.batch_ramp)

    def problems(self, dp: int | None = None) -> list[str]:
        """Everything wrong with this section, given the data-parallel size where it is known."""
        found = [
            f"train.{name}={getattr(self, name)} must be at least {least}"
            for name, least in (
                ("num_steps", 1), ("global_batch_size", 1), ("micro_batch_size", 1), ("log_every", 1),
                ("eval_every", 0), ("eval_steps", 1), ("hang_seconds", 0), ("seed", 0), ("router_every", 1),
                ("dead_expert_steps", 0), ("sequence_chunk", 0),
            )
            if getattr(self, name) < least
        ]  # fmt: skip
        if self.precision not in _DTYPES:
            found.append(f"train.precision={self.precision} is reserved and not built yet; use {', '.join(_DTYPES)}")
        if (problem := recompute_problem(self.recompute)) is not None:
            found.append(problem)
        if self.recompute_stash and self.recompute == "none":
            found.append("train.recompute_stash=true: nothing is computed again; set train.recompute, or leave it off")
        if self.recompute_cut_input and self.recompute in ("none", "selective:norm"):
            found.append("train.recompute_cut_input=true: no inputs are kept to compute from; set train.recompute")
        if self.profile_steps is not None and not 1 <= self.profile_steps[0] <= self.profile_steps[1]:
            found.append(f"train.profile_steps={self.profile_steps} must be a first and a last step from 1")
        if any(step < 1 for step in self.record_router):
            found.append(f"train.record_router={self.record_router} must be steps from 1")
        if self.peak_tflops is not None and self.peak_tflops <= 0:
            found.append(f"train.peak_tflops={self.peak_tflops} must be positive")
        ramp = [f"train.batch_ramp={list(self.batch_ramp or ())}: {text}" for text in self.batch_sizes.problems()]
        if dp is not None and self.global_batch_size > 0 and self.micro_batch_size > 0:
            ramp += [] if ramp else self._ramp_problems(dp)
            found += self._batch_problems(dp)
        return found + ramp

    def _ramp_problems(self, dp: int) -> list[str]:
        """Whether the batches before the last size can be divided."""
        rows = self.micro_batch_size * dp
        odd = [size for size in self.batch_sizes.all[:-1] if size % rows]
        if not odd:
            return []
        listed = ", ".join(map(str, odd[:3])) + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
        return [
            f"train.batch_ramp={list(self.batch_ramp or ())} has batches of {listed} rows, not divisible by"
            f" micro_batch_size * dp = {self.micro_batch_size} * {dp} = {rows}; start and increment must be multiples"
            f" of {rows}"
        ]

    def _batch_problems(self, dp: int) -> list[str]:
        rows, micro = self.global_batch_size, self.micro_batch_size
        if rows % (micro * dp) == 0:
            return []
        below = rows // (micro * dp) * micro * dp
        sizes = [size for size in (below, below + micro * dp) if size > 0]
        message = (
            f"train.global_batch_size={rows} is not divisible by micro_batch_size * dp = {micro} * {dp} = {micro * dp};"
            f" the nearest global batches are {' and '.join(map(str, sizes))}"
        )
        if rows % dp == 0:
            fitting = ", ".join(str(n) for n in range(1, rows // dp + 1) if rows // dp % n == 0)
            message += f", or micro_batch_size can be {fitting}"
        return [message]
