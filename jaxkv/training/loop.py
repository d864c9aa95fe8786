# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, evaluations, checkpoints, and going on after a stop."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable
from os import PathLike
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxkv.training.checkpoint import Checkpoints
from jaxkv.training.config import TrainConfig
from jaxkv.training.data import Data
from jaxkv.training.journal import Journal, Line
from jaxkv.training.placement import ambient_mesh, place_batch, place_state, shardings
from jaxkv.training.progress import Progress
from jaxkv.training.state import Program, TrainState, parameters
from jaxkv.training.step import Metrics, eval_step, train_step

OnMetrics = Callable[[Line], None]


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Holds what a run leaves.

    Attributes:
      model: With the last parameters, float32.
      history: The metrics of every step, those before a resumption included: `step`, `loss`,
        `grad_norm`, `learning_rate`, `tokens_per_second`, and where there was an evaluation
        `validation_loss`.
      state: The last state.
    """

    model: Any
    history: list[Line]
    state: TrainState

    @property
    def validation_loss(self) -> float:
        """Looks up the last validation loss, in nats per token."""
        return self.history[-1]["validation_loss"]


def train(
    model: nnx.Module,
    data: Data,
    config: TrainConfig,
    *,
    directory: str | PathLike[str] | None = None,
    resume: bool = False,
    progress: bool | None = None,
    on_metrics: OnMetrics | None = None,
) -> TrainResult:
    """Trains a model to predict the next token.

    Args:
      model: Called as a `Decoder` is; left as it is. Its `Numerics.dtype` is the compute dtype, and
        what is trained is a float32 copy of its parameters.
      data: Training and validation rows.
      config: Sizes and schedule.
      directory: For checkpoints and metrics; `None` keeps nothing on disk.
      resume: Go on with what is in the directory, if there is something.
      progress: Show a bar; `None`: if this is a terminal.
      on_metrics: Called with the metrics of each step.

    Returns:
      The trained model and its history.

    Raises:
      ValueError: If data, model, config or directory do not fit.
      FloatingPointError: If a loss or gradient is not finite, naming the step. The checkpoints
        are those from before.
      ImportError: If a directory or bar is wanted and its package is missing.

    Sharding: under `jax.set_mesh` parameters lie by their logical axes and rows over the data
    axis, on Auto and Explicit meshes.
    """
    _check(model, data, config)
    mesh = ambient_mesh()
    program = Program.of(model, config)
    state = place_state(program, program.init(parameters(model)), mesh)
    checkpoints = None if directory is None else Checkpoints(directory)
    state = _started(state, checkpoints, resume)
    if int(state.step) > config.steps:
        raise ValueError(f"the run is at step {int(state.step)}: want steps of at least that many.")
    journal = Journal(directory, config, int(state.step))
    with Progress(config.steps, int(state.step), progress) as bar:
        run = _Run(program, data, mesh, checkpoints, journal, bar, on_metrics)
        state = run.go(state)
    return TrainResult(program.model(state.params), journal.history, state)


def _check(model: nnx.Module, data: Data, config: TrainConfig) -> None:
    for split in ("train", "validation"):
        data.count(split, config.length)
    vocab = getattr(model, "vocab", data.vocab)
    if vocab < data.vocab:
        raise ValueError(f"the model knows {vocab} tokens, but the data has {data.vocab}.")


def _started(state: TrainState, checkpoints: Checkpoints | None, resume: bool) -> TrainState:
    if checkpoints is None:
        if resume:
            raise ValueError("resume=True needs the directory of the run.")
        return state
    if checkpoints.last is None:
        return state
    if not resume:
        raise ValueError(
            f"{checkpoints.directory.parent} holds a run of {checkpoints.last} steps: pass "
            f"resume=True (--resume) to go on, or another directory."
        )
    return checkpoints.restore(state)


class _Run:
    """Carries the fixed parts of one call of `train`."""

    def __init__(
        self,
        program: Program,
        data: Data,
        mesh: Mesh | None,
        checkpoints: Checkpoints | None,
        journal: Journal,
        bar: Progress,
        on_metrics: OnMetrics | None,
    ) -> None:
        self.program, self.data, self.mesh = program, data, mesh
        self.checkpoints, self.journal, self.bar = checkpoints, journal, bar
        self.on_metrics = on_metrics
        self.evaluate_step = jax.jit(eval_step(program))
        self.validation: list[Any] | None = None

    def go(self, state: TrainState) -> TrainState:
        """Runs the steps that are missing.

        The metrics of a step are read while the next one computes, so that the device never waits
        for the host; where something is due after a step, they are read at once.
        """
        config = self.program.config
        step = jax.jit(train_step(self.program), donate_argnums=0, out_shardings=self._out(state))
        waiting: tuple[int, Metrics] | None = None
        first, cursor = int(state.step), int(state.cursor)
        self.meter = Meter()
        for number in range(first + 1, config.steps + 1):
            batch = self.data.train_batch(
                cursor, batch=config.batch, length=config.length, seed=config.seed
            ).in_parts(config.accumulate)
            state, metrics = step(state, place_batch(batch, self.mesh))
            cursor += config.batch
            if waiting is not None:
                line = self._read(*waiting)
                self.journal.add(line)
                self._tell(line)
            waiting = (number, metrics)
            evaluates = number == config.steps or _due(number, config.eval_every)
            if evaluates or _due(number, config.save_every):
                self._pause(state, self._read(*waiting), evaluates)
                waiting = None
        return state

    def _out(self, state: TrainState) -> Any:
        if self.mesh is None:
            return None
        return shardings(self.program, state, self.mesh), None

    def _read(self, number: int, metrics: Metrics) -> Line:
        """Waits for a step's metrics.

        Raises:
          FloatingPointError: If they are not finite.
        """
        values = {name: x.item() for name, x in jax.device_get(metrics).items()}
        for name in ("loss", "grad_norm"):
            _finite(number, name, values[name])
        rate = self.meter.rate(values.pop("tokens"))
        return {"step": number, **values, "tokens_per_second": rate}

    def _pause(self, state: TrainState, line: Line, evaluates: bool) -> None:
        """Evaluates and saves what is due after a step."""
        config = self.program.config
        loss = self._evaluate(state.params) if evaluates else None
        if loss is not None:
            line["validation_loss"] = _finite(line["step"], "validation_loss", loss)
        # Written before the checkpoint: a run that goes on from there must find this line.
        self.journal.add(line)
        if self.checkpoints is not None:
            better = loss is not None and loss < self.checkpoints.best_loss
            ends = line["step"] == config.steps
            if better or ends or _due(line["step"], config.save_every):
                self.checkpoints.save(state, loss)
        self._tell(line)
        self.meter = Meter()

    def _evaluate(self, params: Any) -> float:
        """Computes the mean validation loss, the same whatever the parts of a batch are."""
        config = self.program.config
        if self.validation is None:
            self.validation = self.data.validation_batches(
                config.eval_batches * config.accumulate, batch=config.rows, length=config.length
            )
        sums = [
            self.evaluate_step(params, place_batch(batch, self.mesh)) for batch in self.validation
        ]
        total = sum(float(loss) for loss, _ in sums)
        return total / max(1, sum(int(count) for _, count in sums))

    def _tell(self, line: Line) -> None:
        self.bar.show(line)
        if self.on_metrics is not None:
            self.on_metrics(line)


class Meter:
    """Measures tokens per second over the last steps; readings of single ones are uneven."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.readings: collections.deque[tuple[float, int]] = collections.deque(maxlen=10)

    def rate(self, tokens: int) -> float:
        """Adds a step that is done now."""
        self.readings.append((self.last, tokens))
        self.last = time.perf_counter()
        return sum(count for _, count in self.readings) / (self.last - self.readings[0][0])


def _finite(step: int, name: str, value: float) -> float:
    if not math.isfinite(value):
        raise FloatingPointError(
            f"step {step}: {name} is {value}; checkpoints are those from before. A smaller "
            f"learning_rate or clip may help."
        )
    return value


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
