"""The executor: runs a rank's list of actions, one short method for each kind of action.

Nothing here depends on the schedule. What a method finds ready, and when memory is released, follows from the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from megalite.axis import Axis
from megalite.batch import MicroBatch
from megalite.mpu import ParallelState
from megalite.pipeline.lower import lower, peer_of
from megalite.pipeline.p2p import Mailbox
from megalite.pipeline.plan import Action, Kind, Plan, PlanError
from megalite.pipeline.schedule import forward_only
from megalite.pipeline.stage import Reducer, Stage

Trace = Callable[[Action, float, float], None]
"""Receives each action with the times (seconds, `time.perf_counter`) of its beginning, when its input was there, and
of its end."""

Key = tuple[int, int]
"""(stage, microbatch)."""


@dataclass
class _Activation:
    """What a forward leaves for its backward. The output is a mere handle on the graph once it was passed on."""

    input: Tensor | None
    output: Tensor


@dataclass
class _Step:
    """The state of one run of a plan; all of it is empty at the end."""

    microbatches: Sequence[MicroBatch]
    grad_scale: Tensor
    training: bool
    loss: Tensor
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    """From a neighbouring stage on this rank."""
    output_grads: dict[Key, Tensor] = field(default_factory=dict)
    """From a neighbouring stage on this rank."""
    outgoing: dict[Action, Tensor] = field(default_factory=dict)
    """Produced and not sent yet, by SEND action."""
    live: dict[Key, _Activation] = field(default_factory=dict)
    """Activations between a forward and its backward (B or I)."""
    deferred: set[Key] = field(default_factory=set)
    """Between I and W."""
    armed: int | None = None
    """The stage that reduces its gradients in its next B or W."""
    began: float = 0.0
    """When the action under way began to compute (traced runs only)."""


class Executor:
    """Runs `plan` on this rank's `stages`, by stage number; their gradients are reduced by `reducers`.

    Every rank of the layout constructs it with the same plan, which is compared. `replan` makes the plan of a step with
    another number of micro-batches (while a batch ramp lasts), on the same stages; it is called once for each. `trace`,
    which may be set at any time between runs, is called after each action; on CUDA each action is then waited for,
    which costs some overlap.
    `peak_activations` and `peak_until_weight_grad` hold the most (stage, microbatch) activations that were alive at a
    time in the last run, until their B or I, and until their B or W.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage],
        reducers: Mapping[int, Reducer],
        mpu: ParallelState,
        device: torch.device,
        *,
        replan: Callable[[int], Plan] | None = None,
        trace: Trace | None = None,
    ):
        if plan.num_ranks != mpu.pp.size:
            raise PlanError(f"{plan.name} is a plan for {plan.num_ranks} pipeline ranks; parallel.pp={mpu.pp.size}")
        assert set(stages) == set(plan.stages_of(mpu.pp.rank)), f"stages {sorted(stages)} are not this rank's"
        self._world, self._replan, self._reduce_each_pass = mpu.world, replan, mpu.config.zero >= 2
        self._plan = self._ready(plan)
        self._plans = {plan.num_microbatches: self._plan}
        self._evaluations: dict[int, Plan] = {}
        self._stages, self._reducers = dict(stages), dict(reducers)
        self._axis, self._device, self.trace = mpu.pp, device, trace
        self._mailbox = Mailbox(mpu.pp)
        self._mailbox.warm_up((a, b) for a, b in pairwise(plan.placement) if a != b)
        hidden_dtype = next(iter(stages.values())).hidden_dtype
        self._loss_dtype = torch.promote_types(hidden_dtype, torch.float32)
        self.peak_activations = self.peak_until_weight_grad = 0
        self._handlers: dict[Kind, Callable[[_Step, Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRAD: self._input_grad,
            Kind.WEIGHT_GRAD: self._weight_grad,
            Kind.SEND_ACT: self._send,
            Kind.SEND_GRAD: self._send,
            Kind.RECV_ACT: self._receive,
            Kind.RECV_GRAD: self._receive,
            Kind.REDUCE: self._reduce,
        }

    def run(self, microbatches: Sequence[MicroBatch], grad_scale: float | Tensor) -> Tensor:
        """One training step's forwards and backwards; gradients are accumulated and reduced.

        grad_scale: the gradient of what is optimised with respect to the sum of token losses (1 / global number of
        tokens). Returns the sum of the last stage's outputs over `microbatches`, a detached scalar in at least
        float32, of this rank's pipeline alone; zero on ranks without the last stage.
        """
        assert not self._plan.forward_only, f"{self._plan.name} has no backward"
        plan = self._plan_for(len(microbatches))
        step = self._begin(microbatches, grad_scale, training=True)
        self._execute(plan, step)
        # Ranks that share a stage, by ties or in a bidirectional pipeline, meet in the order of the model.
        for stage in sorted(self._reducers, key=plan.model_stage):
            self._reducers[stage].finish()
        return step.loss

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """Forwards only, for any number of microbatches (the same on all ranks); returns what `run` returns."""
        step = self._begin(microbatches, 0.0, training=False)
        self._execute(self._evaluation(len(microbatches)), step)
        return step.loss

    def _plan_for(self, num_microbatches: int) -> Plan:
        """The plan of a training step; all of them place the stages in the same way."""
        if num_microbatches not in self._plans:
            usual = self._plan
            if self._replan is None:
                raise PlanError(
                    f"{num_microbatches} microbatches for {usual.name}, planned for {usual.num_microbatches}"
                )
            plan = self._ready(self._replan(num_microbatches))
            assert plan.num_microbatches == num_microbatches, f"{plan.name} is for {plan.num_microbatches} microbatches"
            assert (plan.placement, plan.num_chains) == (usual.placement, usual.num_chains), "the stages have moved"
            self._plans[num_microbatches] = plan
        return self._plans[num_microbatches]

    def _ready(self, plan: Plan) -> Plan:
        """`plan` with its messages; every rank calls it with the same one."""
        plan = lower(plan, reduce_each_pass=self._reduce_each_pass)
        agree(plan, self._world)
        return plan

    def _evaluation(self, num_microbatches: int) -> Plan:
        if num_microbatches not in self._evaluations:
            plan = lower(forward_only(self._plan.placement[: self._plan.num_stages], num_microbatches))
            agree(plan, self._axis)
            self._evaluations[num_microbatches] = plan
        return self._evaluations[num_microbatches]

    def _begin(self, microbatches: Sequence[MicroBatch], grad_scale: float | Tensor, training: bool) -> _Step:
        if training:
            self.peak_activations = self.peak_until_weight_grad = 0
        return _Step(
            microbatches=[microbatch.to(self._device) for microbatch in microbatches],
            grad_scale=torch.as_tensor(grad_scale, dtype=self._loss_dtype, device=self._device),
            training=training,
            loss=torch.zeros((), dtype=self._loss_dtype, device=self._device),
        )

    def _execute(self, plan: Plan, step: _Step) -> None:
        """Runs this rank's actions; nothing is left over at the end."""
        for action in plan.actions[self._axis.rank]:
            self._input_is_there(step)
            try:
                self._handlers[action.kind](step, action)
            except Exception as error:
                error.add_note(f"in action {action} of {plan.name} on pipeline rank {self._axis.rank}")
                raise
            if self.trace is not None:
                self.trace(action, step.began, self._now())
        self._mailbox.drain()
        left = [*step.inputs, *step.output_grads, *step.outgoing, *step.live, *step.deferred]
        assert not left, f"left over at the end of {plan.name}: {left}"
        for number, stage in self._stages.items():
            assert not stage.queue.num_waiting, f"stage {number}: {stage.queue.num_waiting} weight gradients not run"

    def _now(self) -> float:
        """The time when all work so far is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _input_is_there(self, step: _Step) -> None:
        """A trace counts the wait for a message as idle time, not as work."""
        if self.trace is not None:
            step.began = self._now()

    def _forward(self, step: _Step, action: Action) -> None:
        _, number, microbatch = action
        x = self._input(step, action)
        output = self._stages[number](x, step.microbatches[microbatch])
        self._leave(number)
        if step.training:
            step.live[number, microbatch] = _Activation(x, output)
            self.peak_activations = max(self.peak_activations, len(step.live))
            self.peak_until_weight_grad = max(self.peak_until_weight_grad, len(step.live) + len(step.deferred))
        following = self._plan.next_stage(number)
        if following is None:
            step.loss += output.detach()
        elif following in self._stages:
            step.inputs[following, microbatch] = _take_memory(output).requires_grad_(step.training)
        else:
            step.outgoing[action._replace(kind=Kind.SEND_ACT)] = _take_memory(output)

    def _backward(self, step: _Step, action: Action) -> None:
        self._differentiate(step, action)
        self._complete(step, action)

    def _differentiate(self, step: _Step, action: Action) -> None:
        """The backward pass of a B or I, as far as the stage's queue does not defer it."""
        _, number, microbatch = action
        activation = step.live.pop((number, microbatch))
        grad = self._output_grad(step, action, activation.output)
        if activation.output.requires_grad:  # not so on a first stage that is all frozen
            torch.autograd.backward(activation.output, grad)
        self._leave(number)
        previous = self._plan.previous_stage(number)
        if previous is None:
            return
        x = activation.input
        assert x is not None
        input_grad = x.grad if x.grad is not None else torch.zeros_like(x)
        if previous in self._stages:
            step.output_grads[previous, microbatch] = input_grad
        else:
            step.outgoing[action._replace(kind=Kind.SEND_GRAD)] = input_grad

    def _input_grad(self, step: _Step, action: Action) -> None:
        """A backward whose weight gradients stay in the stage's queue."""
        queue = self._stages[action.stage].queue
        queue.deferring, queue.microbatch = True, action.microbatch
        try:
            self._differentiate(step, action)
        finally:
            queue.deferring = False
        step.deferred.add((action.stage, action.microbatch))

    def _weight_grad(self, step: _Step, action: Action) -> None:
        self._stages[action.stage].queue.drain(action.microbatch)
        step.deferred.remove((action.stage, action.microbatch))
        self._complete(step, action)

    def _send(self, step: _Step, action: Action) -> None:
        # A view into larger memory would be sent right, but would keep that memory; a strided one could not be sent.
        self._mailbox.send(step.outgoing.pop(action).contiguous(), peer_of(self._plan, action))

    def _receive(self, step: _Step, action: Action) -> None:
        stage = self._stages[action.stage]
        shape = stage.hidden_shape(step.microbatches[action.microbatch])
        buffer = torch.empty(shape, dtype=stage.hidden_dtype, device=self._device)
        self._mailbox.receive(action, buffer, peer_of(self._plan, action))

    def _reduce(self, step: _Step, action: Action) -> None:
        if action.stage in self._reducers:
            self._reducers[action.stage].arm(action.microbatch)
            step.armed = action.stage

    def _complete(self, step: _Step, action: Action) -> None:
        """After the last pass of a stage its reductions start, before those of any other stage of this rank do."""
        if step.armed == action.stage:
            self._reducers[action.stage].complete()
            step.armed = None

    def _leave(self, number: int) -> None:
        """A pass through the stage is over."""
        if number in self._reducers:
            self._reducers[number].leave()

    def _input(self, step: _Step, action: Action) -> Tensor | None:
        """The input of a forward: a leaf of the stage's graph."""
        previous = self._plan.previous_stage(action.stage)
        if previous is None:
            return None
        if previous in self._stages:
            return step.inputs.pop((action.stage, action.microbatch))
        message = self._mailbox.take(action._replace(kind=Kind.RECV_ACT))
        self._input_is_there(step)
        return message.requires_grad_(step.training)

    def _output_grad(self, step: _Step, action: Action, output: Tensor) -> Tensor:
        """The gradient with which a backward starts."""
        following = self._plan.next_stage(action.stage)
        if following is None:
            return step.grad_scale.to(output.dtype)
        if following in self._stages:
            return step.output_grads.pop((action.stage, action.microbatch))
        message = self._mailbox.take(action._replace(kind=Kind.RECV_GRAD))
        self._input_is_there(step)
        return message


def _take_memory(output: Tensor) -> Tensor:
    """The output's data as a tensor outside of the graph, to which alone the memory belongs from now on.

    The graph needs the output no more: the next stage has the data, and what backward needs was saved. One element,
    expanded, keeps the shape that autograd checks the gradient against.
    """
    message = output.detach()
    if output.grad_fn is not None:
        output.data = output.new_empty(()).expand(output.shape)
    return message


def agree(plan: Plan, axis: Axis) -> None:
    """Raises PlanError on every rank of `axis` unless all have the same plan: different ones would hang."""
    digests = axis.gather_objects((plan.digest, f"{plan.name} with {plan.num_microbatches} microbatches"))
    if len({digest for digest, _ in digests}) > 1:
        plans = "; ".join(f"rank {rank}: {title}, {digest[:8]}" for rank, (digest, title) in enumerate(digests))
        raise PlanError(f"the ranks of {axis.name} have different plans: {plans}")
