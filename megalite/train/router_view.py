"""What a run shows of its routers: router.jsonl, the heat map, and a word about experts that get no tokens."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.files import replace_bytes
from megalite.train.callbacks import Callback
from megalite.train.heat_map import LoadHistory, Panel, draw
from megalite.train.metrics import RouterStats, Speed, StepMetrics
from megalite.train.run_folder import JsonLines, RunFolder, each_row

logger = logging.getLogger("megalite")


class DeadExperts:
    """Finds experts that no token has chosen for `patience` steps in a row (0: never looks)."""

    def __init__(self, shape: tuple[int, int], patience: int):
        self._patience = patience
        self._idle = np.zeros(shape, dtype=np.int64)
        self.dead: NDArray[np.bool_] = np.zeros(shape, dtype=np.bool_)

    def see(self, tokens: NDArray[np.int64], num_steps: int = 1) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Takes the tokens [layers, num_experts] of a step (or one of `num_steps`); returns who died and who revived.

        Each death and each revival is in one answer.
        """
        self._idle = np.where(tokens > 0, 0, self._idle + num_steps)
        dead = self._idle >= self._patience if self._patience else self.dead
        died, revived = dead & ~self.dead, self.dead & ~dead
        self.dead = dead
        return died, revived


class RouterView(Callback):
    """Writes router.jsonl and router_heatmap.png, and warns of dead experts; for rank 0.

    A row of router.jsonl is {"step", "layers", "tokens"}: tokens[i][e] choices of expert e in MoE layer layers[i] over
    the global batch of this step, before drops; every `every` steps. The picture is drawn at checkpoints and at the
    end. After a resume both go on from the rows that were kept.
    """

    def __init__(self, folder: RunFolder, *, every: int, dead_expert_steps: int):
        self._folder, self._every, self._patience = folder, every, dead_expert_steps
        self._file: JsonLines | None = None
        self._history: LoadHistory | None = None
        self._dead = DeadExperts((0, 0), 0)
        self._stats: RouterStats | None = None
        """Of the last step of this session; the picture has it already when there is none."""

    def before_run(self, step: int) -> None:
        """Reads what is there of the run so far, and opens the file at its end."""
        before = 0
        for row in each_row(self._folder.router_file):
            tokens = np.array(row["tokens"], dtype=np.int64)
            self._look(row["step"], tuple(row["layers"]), tokens, row["step"] - before)
            before = row["step"]
        self._file = JsonLines(self._folder.router_file)

    def after_step(self, metrics: StepMetrics, speed: Speed) -> None:
        """Takes the counts of the step."""
        self._stats = stats = metrics.moe
        assert stats is not None and self._file is not None, "a model with experts reports its routers"
        if metrics.step % self._every == 0:
            row = {"step": metrics.step, "layers": list(stats.layers), "tokens": stats.tokens.tolist()}
            self._file.append(row)
        died, revived = self._look(metrics.step, stats.layers, stats.tokens)
        if died.any():
            experts = _by_layer(died, stats.layers)
            logger.warning("step %d | dead experts, no token in %d steps: %s", metrics.step, self._patience, experts)
        if revived.any():
            logger.warning("step %d | experts alive again: %s", metrics.step, _by_layer(revived, stats.layers))

    def after_checkpoint(self, step: int, path: Path | str) -> None:
        """Brings the rows to disk and draws."""
        if self._file is not None:
            self._file.sync()
        self._draw()

    def after_run(self, step: int) -> None:
        """Draws what came after the last checkpoint, and closes the file."""
        self._draw()
        if self._file is not None:
            self._file.close()

    def _look(
        self, step: int, layers: tuple[int, ...], tokens: NDArray[np.int64], num_steps: int = 1
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        if self._history is None:
            self._history = LoadHistory(layers, tokens.shape[1])
            self._dead = DeadExperts((len(layers), tokens.shape[1]), self._patience)
        self._history.add(step, tokens)
        return self._dead.see(tokens, num_steps)

    def _draw(self) -> None:
        stats, history = self._stats, self._history
        if stats is None or history is None:
            return
        panels = []
        for place, (layer, violation) in enumerate(zip(stats.layers, stats.max_violation, strict=True)):
            dead = np.flatnonzero(self._dead.dead[place]).tolist()
            title = f"layer {layer}, max violation {violation:.2f}" + (f", {len(dead)} dead" if dead else "")
            panels.append(Panel(title=title, tokens=history.of_layer(place), dead=dead))
        try:
            picture = draw(panels, title="Expert load by layer", steps_per_bin=history.steps_per_bin)
            replace_bytes(self._folder.router_heatmap, picture)
        except Exception as error:  # a picture is no reason to end a training run
            logger.warning("%s was not drawn: %s: %s", self._folder.router_heatmap, type(error).__name__, error)
        self._stats = None


def _by_layer(experts: NDArray[np.bool_], layers: tuple[int, ...]) -> str:
    """`layer 1: 3 7, layer 5: 0`."""
    found = ((layer, np.flatnonzero(row).tolist()) for layer, row in zip(layers, experts, strict=True))
    return ", ".join(f"layer {layer}: {' '.join(map(str, names))}" for layer, names in found if names)
