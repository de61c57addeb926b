"""A model for the lm-evaluation-harness (Gao et al., 2024, doi:10.5281/zenodo.12608602), of the extra `eval`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]

from megalite.generate.command import ModelArguments, asked_layout, context_of
from megalite.generate.generator import Generator
from megalite.generate.load import find_words, inference_layout, load_stage, read_source
from megalite.generate.row import Stop
from megalite.generate.sampling import Sampling
from megalite.generate.score import Score, score
from megalite.generate.windows import Window, windows
from megalite.mpu import ParallelState
from megalite.train.distributed import start
from megalite.train.run import world_size


@register_model("megalite")
class MegaliteLM(LM):
    """The model in `src` (see tools/generate.py), on the layout that torchrun started.

    All ranks answer the same requests: the harness sees one, and writes its results once on each, so that other ranks
    than the first need no output path. Options are those of the command; batch_size and device come from the harness.
    """

    def __init__(
        self,
        src: str,
        *,
        layout: str | None = None,
        dtype: str = "auto",
        tokenizer: str | None = None,
        context: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        device: str | None = None,
        **ignored: Any,
    ):
        super().__init__()
        arguments = ModelArguments(
            src=src, layout=layout, dtype=dtype, tokenizer=tokenizer, context=context,  # pyright: ignore[reportArgumentType]
            device=(device or "auto").partition(":")[0],
        )  # fmt: skip
        if problems := arguments.model_problems():
            raise ValueError("\n".join(problems))
        self._stack = ExitStack()
        launch = self._stack.enter_context(start(arguments.device))
        ranks = world_size()
        self._mpu = ParallelState.build(inference_layout(asked_layout(layout, ranks, "lm_eval"), ranks))
        self._device, self._max_gen_toks = launch.device, max_gen_toks
        given = str(batch_size)
        self._batch_size = int(given) if given.isdigit() else 8  # "auto" and None
        source = read_source(src, self._mpu)
        self.words, self._name = find_words(source, tokenizer), source.path
        self.tokenizer = self.words.tokenizer
        self.context = context_of(arguments, source)
        loaded = load_stage(source, self._mpu, self._device, arguments.dtype, rows=self._batch_size)
        self._stage = loaded.stage
        self._generator = Generator(self._stage, self._mpu, self._device, context=self.context)

    @property
    def tokenizer_name(self) -> str:
        """What distinguishes cached requests."""
        return f"{self._name}:{self.tokenizer.fingerprint}"

    def close(self) -> None:
        """Leaves the job in order."""
        self._stack.close()

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability, whether it is what greedy generation says) of each request's continuation of a context."""
        scores = self._score([self._ending(*request.args) for request in requests])
        self._remember("loglikelihood", requests, scores)
        return [(found.log_prob, found.is_greedy) for found in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each request's whole text, in windows that do not overlap but for the last one."""
        rows: list[Window] = []
        counts = []
        for request in requests:
            tokens = np.array(self.words.document(request.args[0]), dtype=np.int64)
            of_text = list(windows(tokens, self.context, self.context))
            rows += of_text
            counts.append(len(of_text))
        scores = iter(self._score(rows))
        sums = [sum(next(scores).log_prob for _ in range(count)) for count in counts]
        self._remember("loglikelihood_rolling", requests, sums)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each request's context, by its own settings; requests with equal ones are a batch."""
        found = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        for group in groups.values():
            group.sort(key=lambda i: -len(requests[i].args[0]))
            for begin in range(0, len(group), self._batch_size):
                batch = group[begin : begin + self._batch_size]
                self._generate(batch, [requests[i] for i in batch], found)
        self._remember("generate_until", requests, found)
        return found

    def _generate(self, numbers: Sequence[int], requests: Sequence[Any], found: list[str]) -> None:
        """Continues requests with equal settings, as Hugging Face's generate knows them, into `found`."""
        settings = dict(requests[0].args[1])
        until = settings.get("until") or []
        strings = (until,) if isinstance(until, str) else tuple(until)
        most = int(settings.get("max_gen_toks", self._max_gen_toks))
        greedy = not settings.get("do_sample", settings.get("temperature", 0.0) > 0.0)
        sampling = Sampling(
            temperature=0.0 if greedy else float(settings.get("temperature", 1.0)),
            top_k=int(settings.get("top_k", 0)),
            top_p=float(settings.get("top_p", 1.0)),
        )
        room = max(1, self.context - most)
        prompts = [self.words.prompt(request.args[0])[-room:] for request in requests]
        stop = Stop(max_new_tokens=most, tokens=self.words.ends, strings=strings)
        rows = self._generator.generate(prompts, sampling, stop, numbers=numbers, tokenizer=self.tokenizer)
        for i, row in zip(numbers, rows, strict=True):
            found[i] = row.text or ""

    def _ending(self, context: str, continuation: str) -> Window:
        """A continuation after as much of its context as fits; spaces at the end of a context belong to what follows.

        The tokens of a continuation are those that follow the context's in the tokens of both together.
        """
        stripped = context.rstrip()
        context, continuation = stripped, context[len(stripped) :] + continuation
        before = self.tokenizer.encode(context)
        after = self.tokenizer.encode(context + continuation)[len(before) :]
        first = self.words.prefix if before else self.words.beginning
        whole = np.array([*first, *before, *after], dtype=np.int64)[-(self.context + 1) :]
        return Window(whole, min(len(after), len(whole) - 1))

    def _score(self, rows: Sequence[Window]) -> list[Score]:
        return score(rows, self._stage, self._mpu, self._device, batch_size=self._batch_size)

    def _remember(self, kind: str, requests: Sequence[Any], answers: Sequence[Any]) -> None:
        """Hands answers to the harness's cache."""
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)
