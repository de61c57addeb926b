"""Generation on any layout: a prefill of all prompts of a batch, then a token of every row at a time.

Under tensor and expert parallelism every rank takes part in each step; pipeline stages hand hidden states down, and the
last one chooses. One rank chooses for all, and all follow the same rows, so that they end together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.data.tokenizer import Tokenizer
from megalite.generate.pipe import first_of_last_stage, run_stage
from megalite.generate.row import Completion, OnText, Row, Stop
from megalite.generate.sampling import Sampling, choose
from megalite.models.transformer import Transformer
from megalite.mpu import ParallelState
from megalite.nn.cache import Cache


@dataclass
class Speed:
    """What took how long, in seconds."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    new_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows in the time after prompts were read."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds else 0.0


class Generator:
    """Continues rows of tokens with the stage of the model that is on this rank.

    context: the most tokens that the model sees. A row that grows beyond it forgets its oldest tokens, a quarter of
    `context` at a time, and what is left is read again from position 0. prefill_chunk: tokens of each row that are read
    at once, which bounds memory.
    """

    def __init__(
        self,
        stage: Transformer,
        mpu: ParallelState,
        device: torch.device,
        *,
        context: int,
        prefill_chunk: int = 2048,
    ):
        assert not stage.training, "generation is for a model in eval mode"
        self.stage, self.mpu, self.device = stage, mpu, device
        self.context, self._prefill_chunk = context, prefill_chunk
        self.speed = Speed()
        self._chooser = first_of_last_stage(mpu)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        stop: Stop,
        *,
        numbers: Sequence[int] | None = None,
        tokenizer: Tokenizer | None = None,
        on_text: OnText | None = None,
    ) -> list[Completion]:
        """The continuations of `prompts`, none of which may be empty; every rank calls it with the same arguments.

        numbers: of the rows, which key their samples; 0, 1, ... by default. tokenizer: for text and stop strings.
        """
        assert tokenizer is not None or not stop.strings, "stop strings need a tokenizer"
        assert all(prompts), "a prompt has no token; begin one with the end of a document"
        numbers = range(len(prompts)) if numbers is None else numbers
        rows = [
            Row(number, prompt, stop, tokenizer, on_text)
            for number, prompt in zip(numbers, prompts, strict=True)
        ]  # fmt: skip
        active = rows
        with torch.inference_mode():
            while active:
                active = self._run(active, sampling)
        return [row.completion() for row in rows]

    def _run(self, active: list[Row], sampling: Sampling) -> list[Row]:
        """Continues rows until one must be read again or all have ended; returns those that have not."""
        began = time.perf_counter()
        forgotten = [self._num_forgotten(row) for row in active]
        cache, logits = self._read(active)
        tokens = self._choose(logits, active, sampling)
        self.speed.prefill_seconds += time.perf_counter() - began
        self.speed.prompt_tokens += int((cache.length - cache.padding).sum())
        began, steps = time.perf_counter(), 0
        while True:
            for row, token in zip(active, tokens, strict=True):
                row.add(token)
            left = [i for i, row in enumerate(active) if row.reason is None]
            if not left:
                break
            if cache.length == cache.capacity or any(self._num_forgotten(active[i]) > forgotten[i] for i in left):
                break
            if len(left) < len(active):
                cache.select(torch.tensor(left, device=self.device))
                active, forgotten = [active[i] for i in left], [forgotten[i] for i in left]
                tokens = [tokens[i] for i in left]
            steps += len(active)
            logits = self._step(torch.tensor([tokens], device=self.device), cache)
            tokens = self._choose(logits, active, sampling)
        self.speed.new_tokens += steps
        self.speed.decode_seconds += time.perf_counter() - began
        return [row for row in active if row.reason is None]

    def _num_forgotten(self, row: Row) -> int:
        """Tokens at the beginning of a row that are too many for the context; depends on its length alone."""
        beyond, chunk = len(row.tokens) - self.context, max(1, self.context // 4)
        return max(0, -(-beyond // chunk) * chunk)

    def _read(self, rows: Sequence[Row]) -> tuple[Cache, Tensor | None]:
        """A cache that holds the rows, and the logits of what follows them (of the last stage)."""
        seen = [row.tokens[self._num_forgotten(row) :] for row in rows]
        lengths = torch.tensor([len(tokens) for tokens in seen])
        longest = int(lengths.max())
        room = min(max(row.num_left for row in rows), max(1, self.context - int(lengths.min()) + 1))
        cache = Cache.padded(lengths.to(self.device), longest + room)
        tokens = torch.tensor([[0] * (longest - len(row)) + row for row in seen], device=self.device).t()
        logits = None
        for part in tokens.split(self._prefill_chunk):
            logits = self._step(part.contiguous(), cache)
        return cache, logits

    def _step(self, tokens: Tensor, cache: Cache) -> Tensor | None:
        """Logits [b, vocab] of what follows tokens [n, b], on ranks of the last stage."""
        logits = run_stage(self.stage, self.mpu, cache.batch(tokens), cache, keep=_last_place)
        return logits[0] if logits is not None else None

    def _choose(self, logits: Tensor | None, rows: Sequence[Row], sampling: Sampling) -> list[int]:
        """The next token of every row, on every rank."""
        world = self.mpu.world
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=world.device)
        if world.rank == self._chooser:
            assert logits is not None
            seen = self._seen(logits, rows) if sampling.repetition_penalty != 1.0 else None
            numbers, positions = [row.number for row in rows], [len(row.tokens) for row in rows]
            tokens = choose(logits, sampling, numbers, positions, seen).to(world.device)
        return world.broadcast(tokens, self._chooser).tolist()

    def _seen(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """bool [b, vocab]: the tokens of each row."""
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for mask, row in zip(seen, rows, strict=True):
            mask[torch.tensor(row.tokens, device=mask.device)] = True
        return seen


def _last_place(hidden: Tensor) -> Tensor:
    """[1, b, h]."""
    return hidden[-1:]
