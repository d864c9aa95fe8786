# SPDX-License-Identifier: Apache-2.0
"""The check for GPUs runs at tiny size on a CPU, and sees what is wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_check
import jax
import jax.numpy as jnp
import pytest

from jaxkv.ops.einsum import Einsum

# Of each part one; the others differ in options and sizes.
CALLS = ("documents",)
FIRST = {16: "causal", 17: "causal", 19: "8 documents"}


@pytest.fixture(autouse=True)
def as_scripts_run() -> Iterator[None]:
    """Promotes as JAX does by default: the rivals rely on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@dataclasses.dataclass(frozen=True)
class Wrong(Einsum):
    """Is off by a little."""

    name: str = "wrong"

    def run(self, operands: Any) -> Any:
        out, lse = super().run(operands)
        return out * jnp.asarray(1.1, out.dtype), lse


def some(monkeypatch: pytest.MonkeyPatch) -> None:
    every, races = gpu_check.small_calls, gpu_check.races
    monkeypatch.setattr(
        gpu_check, "small_calls", lambda s: (c for c in every(s) if c.name in CALLS)
    )
    monkeypatch.setattr(
        gpu_check, "races", lambda s: (r for r in races(s) if r.call.name == FIRST[r.goal])
    )


def test_it_runs_and_writes_what_it_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some(monkeypatch)
    monkeypatch.setattr(gpu_check.Setting, "plain", lambda self: (Wrong(),))
    path = tmp_path / "figures.json"
    assert gpu_check.main(["--dry", "--calls", "1", "--output", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "wrong     WRONG, worst" in printed and "goal 19" in printed
    report = json.loads(path.read_text())
    assert report["wrong"] == 1 and report["left_out"] == 0 and report["versions"]["jax"]
    kernels = [row for row in report["results"] if row.get("implementation") == "triton"]
    assert [row["right"] for row in kernels] == [True]
    timed = {row["goal"]: row["speed"] for row in report["results"] if "goal" in row}
    assert timed.keys() == FIRST.keys() and all(speed > 0 for speed in timed.values())


def test_what_no_time_is_left_for_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "facts", lambda: {"device": "", "versions": {}})
    report = gpu_check.check(gpu_check.Setting(dry=True, calls=1, budget=-1))
    assert report["results"] == [] and report["left_out"] > 40


def test_in_earnest_it_wants_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main([])
    assert "JAX finds no GPU here (cpu only): want --dry" in capsys.readouterr().err
