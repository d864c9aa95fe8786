# SPDX-License-Identifier: Apache-2.0
"""Runs: they learn, stop when they must, and go on as if they had never stopped."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxkv.training import (
    Checkpoints,
    PackedData,
    TextData,
    TrainConfig,
    TrainResult,
    restore_model,
    train,
)
from jaxkv.training.loop import Meter
from tests.training.tiny import POISON, Bigram, decoder

TEXT = b"It is a tale told by an idiot, full of sound and fury, signifying nothing. " * 40
DATA = TextData(TEXT)
CONFIG = TrainConfig(
    steps=11, batch=4, length=16, learning_rate=0.03, warmup=2, accumulate=2,
    eval_every=4, eval_batches=2, save_every=3, seed=5,
)  # fmt: skip


def bigram() -> Bigram:
    return Bigram(rngs=nnx.Rngs(0), dropout_rate=0.3)


class Killed(Exception):
    """Ends a run from within, as a lost machine would."""


def killed_at(step: int) -> Any:
    def on_metrics(line: dict[str, Any]) -> None:
        if line["step"] == step:
            raise Killed

    return on_metrics


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in history]


def bits(state: Any) -> list[bytes]:
    state = dataclasses.replace(state, key=jax.random.key_data(state.key))
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def assert_same_run(a: TrainResult, b: TrainResult) -> None:
    assert bits(a.state) == bits(b.state)
    assert timeless(a.history) == timeless(b.history)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainResult, Path]:
    directory = tmp_path_factory.mktemp("unbroken")
    return train(bigram(), DATA, CONFIG, directory=directory), directory


@pytest.mark.parametrize("stops", [(1,), (2, 3), (5,), (8, 10), (11,)])
def test_a_resumed_run_is_bit_identical_to_an_unbroken_one(
    stops: tuple[int, ...], unbroken: tuple[TrainResult, Path], tmp_path: Path
) -> None:
    for number, step in enumerate(stops):
        with pytest.raises(Killed):
            train(
                bigram(), DATA, CONFIG,
                directory=tmp_path, resume=number > 0, on_metrics=killed_at(step),
            )  # fmt: skip
    resumed = train(bigram(), DATA, CONFIG, directory=tmp_path, resume=True)
    whole, directory = unbroken
    assert_same_run(resumed, whole)
    here, there = Checkpoints(tmp_path), Checkpoints(directory)
    assert (here.last, here.best, here.best_loss) == (there.last, there.best, there.best_loss)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == resumed.history


def test_a_decoder_with_dropout_and_packing_resumes_bit_identical(tmp_path: Path) -> None:
    data = PackedData([TEXT[n : n + 9 + n % 7] for n in range(90)])
    config = dataclasses.replace(CONFIG, steps=4, save_every=2, eval_every=None)

    def run(**options: Any) -> TrainResult:
        return train(decoder(attention_dropout=0.2), data, config, **options)

    with pytest.raises(Killed):
        run(directory=tmp_path, on_metrics=killed_at(3))
    assert Checkpoints(tmp_path).last == 2
    assert_same_run(run(directory=tmp_path, resume=True), run())


def test_history_tells_every_step(unbroken: tuple[TrainResult, Path]) -> None:
    result, _ = unbroken
    assert [line["step"] for line in result.history] == list(range(1, 12))
    evaluated = [line["step"] for line in result.history if "validation_loss" in line]
    assert evaluated == [4, 8, 11]
    assert result.validation_loss == result.history[-1]["validation_loss"]
    assert set(result.history[0]) == {
        "step", "loss", "grad_norm", "learning_rate", "tokens_per_second",
    }  # fmt: skip
    assert (int(result.state.step), int(result.state.cursor)) == (11, 44)


def test_validation_loss_is_that_of_the_model(unbroken: tuple[TrainResult, Path]) -> None:
    result, directory = unbroken
    total, count = 0.0, 0
    for batch in DATA.validation_batches(2, batch=4, length=16):
        logits = np.asarray(result.model(jax.numpy.asarray(batch.inputs))[0], np.float64)
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for row, targets, keep in zip(logp, batch.targets, batch.mask, strict=True):
            total -= sum(row[t, target] for t, target in enumerate(targets) if keep[t])
            count += len(targets) * keep[0]
    assert result.validation_loss == pytest.approx(total / count, rel=1e-5)
    last = restore_model(directory, bigram(), "last")
    np.testing.assert_array_equal(last.kernel[...], result.model.kernel[...])


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path: Path) -> None:
    train(bigram(), DATA, CONFIG, directory=tmp_path)
    longer = dataclasses.replace(CONFIG, steps=13)
    result = train(bigram(), DATA, longer, directory=tmp_path, resume=True)
    assert [line["step"] for line in result.history] == list(range(1, 14))
    finished = train(bigram(), DATA, longer, directory=tmp_path, resume=True)
    assert_same_run(finished, result)


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(bigram(), DATA, CONFIG, directory=tmp_path, on_metrics=killed_at(7))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    result = train(bigram(), DATA, CONFIG, directory=tmp_path, resume=True)
    assert [line["step"] for line in result.history] == list(range(1, 12))


def test_runs_that_cannot_be_are_refused(
    unbroken: tuple[TrainResult, Path], tmp_path: Path
) -> None:
    directory = unbroken[1]
    for options, words in (
        (dict(directory=directory), "holds a run of 11 steps: pass resume=True"),
        (dict(resume=True), "resume=True needs the directory"),
    ):
        with pytest.raises(ValueError, match=words):
            train(bigram(), DATA, CONFIG, **options)
    other = dataclasses.replace(CONFIG, seed=6)
    with pytest.raises(ValueError, match="began with seed=5: it cannot go on with seed=6"):
        train(bigram(), DATA, other, directory=directory, resume=True)
    with pytest.raises(ValueError, match=r"another model: embedding is \(256, 4\)"):
        train(Bigram(3, rngs=nnx.Rngs(0)), DATA, CONFIG, directory=directory, resume=True)
    with pytest.raises(ValueError, match="length=16 needs 17 in each"):
        train(bigram(), TextData("short"), CONFIG, directory=tmp_path)
    small = bigram()
    small.vocab = 200
    with pytest.raises(ValueError, match="the model knows 200 tokens, but the data has 256"):
        train(small, DATA, CONFIG)


def poisoned(place: int) -> tuple[int, TextData]:
    """Puts one poisonous byte into the text, and finds the step that reads it first."""
    data = TextData(TEXT[:place] + bytes([POISON]) + TEXT[place + 1 :])
    for step in range(1, 60):
        batch = data.train_batch(4 * step - 4, batch=4, length=16, seed=5)
        if (batch.inputs == POISON).any():
            return step, data
    return 0, data


def test_a_loss_that_is_not_finite_stops_and_names_the_step(tmp_path: Path) -> None:
    first, data = next(
        (step, data) for step, data in map(poisoned, range(1000, 2000, 20)) if step > 8
    )
    config = dataclasses.replace(CONFIG, steps=first + 5)
    with pytest.raises(FloatingPointError, match=rf"^step {first}: loss is nan"):
        train(bigram(), data, config, directory=tmp_path)
    good = Checkpoints(tmp_path)
    assert good.last == max(s for s in range(first) if s % 3 == 0 or s == good.best)
    assert np.isfinite(restore_model(tmp_path, bigram(), "last").kernel[...]).all()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == first - 1


def test_a_gradient_that_is_not_finite_stops_too() -> None:
    model = bigram()
    # Half the way to overflow: the loss is finite, the square of its gradient is not.
    model.embedding[...] = model.embedding[...] * 1e20
    with pytest.raises(FloatingPointError, match=r"^step 1: grad_norm is inf"):
        train(model, DATA, CONFIG)


def test_a_decoder_learns_a_short_text_by_heart() -> None:
    data = TextData("abcdefgh" * 30, validation=0.2)
    config = TrainConfig(steps=80, batch=4, length=16, learning_rate=0.02, warmup=5)
    result = train(decoder(), data, config)
    assert result.history[0]["loss"] > math.log(100)
    assert result.validation_loss < 0.1


def test_speed_is_that_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = Meter()
    rates = []
    for seconds in (4.0, 1.0, *(2.0,) * 10):
        now[0] += seconds
        rates.append(meter.rate(20))
    assert rates[:2] == [5.0, 8.0]
    assert rates[-1] == 10.0


def test_progress_is_shown_if_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(CONFIG, steps=2, warmup=0)
    train(bigram(), DATA, config)
    assert capsys.readouterr().err == ""
    train(bigram(), DATA, config, progress=True)
    shown = capsys.readouterr().err
    assert "step 2/2" in shown and "validation" in shown
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match=r'pip install "jaxkv\[train\]"'):
        train(bigram(), DATA, config, progress=True)


KILLED_RUN = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_disable_most_optimizations", True)
from jaxkv.training import train
from tests.training.test_loop import DATA, LONG, bigram
result = train(bigram(), DATA, LONG, directory=sys.argv[1], resume=True, progress=False,
               on_metrics=lambda line: print(line["step"], flush=True))
print("done", flush=True)
"""
LONG = dataclasses.replace(CONFIG, steps=150, save_every=1)


@pytest.mark.full
def test_a_run_killed_at_any_moment_goes_on_bit_identical(tmp_path: Path) -> None:
    whole = train(bigram(), DATA, LONG)
    random = np.random.default_rng(0)
    command = [sys.executable, "-c", KILLED_RUN, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    for _ in range(4):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as run:
            assert run.stdout is not None
            assert run.stdout.readline(), "the run did not start"
            # After the first step nearly all of the time goes into checkpoints.
            time.sleep(random.uniform(0.0, 1.5))
            run.send_signal(signal.SIGKILL)
            assert "done" not in run.stdout.read()
    result = train(bigram(), DATA, LONG, directory=tmp_path, resume=True)
    assert_same_run(result, whole)
