# SPDX-License-Identifier: Apache-2.0
"""The comparisons of scripts/bench.py run, and their rivals compute the same."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import attention as flash
from families import latent, model, steps
from families.measuring import QUICK, Counted, Sizes, Timed, measure

from jaxkv.cache import Paged

# Of each family one case for every kind of step; the others differ in sizes and formats.
PARTS = {
    "decode": ["B=1 float32 live 16 ", "module, MHA 8 heads, B=1"],
    "live": ["jax.nn, float32"],
    "ragged": ["ring, float32"],
    "latent": ["numbers kept", "B=1 float32"],
    "quantised": ["a token", "int4, B=1"],
    "model": ["B=1 float32"],
    "attention": ["32 tokens, float32, gradient", "a window", "rms error"],
}


@pytest.fixture(autouse=True)
def as_scripts_run() -> Iterator[None]:
    """Promotes as JAX does by default: the rivals rely on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("family", bench.FAMILIES)
def test_the_family_runs(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    every = list(bench.FAMILIES[family](QUICK))
    some = [case for case in every if any(part in case.name for part in PARTS[family])]
    assert len(some) >= len(PARTS[family])
    monkeypatch.setitem(bench.FAMILIES, family, lambda sizes: iter(some))
    bench.main(family, quick=True, repeats=1, output=tmp_path / "figures.json")
    assert f"{family}: median of 1 runs" in capsys.readouterr().out
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [row["case"] for row in rows] == [case.name for case in some]
    assert all(row["ratio"] > 0 for row in rows)


def test_attention_is_drawn_against_the_length(tmp_path: Path) -> None:
    with pytest.raises(bench.typer.BadParameter, match="no case that depends on a length"):
        bench.main("latent", quick=True, repeats=1, plot=tmp_path / "none.png")
    bench.main("attention", quick=True, repeats=1, plot=tmp_path / "lines.png")
    assert (tmp_path / "lines.png").read_bytes()[:4] == b"\x89PNG"


def test_times_have_goals_only_at_full_sizes() -> None:
    for make in bench.FAMILIES.values():
        assert any(case.goal is not None for case in make(Sizes()))
        assert all(case.goal is None for case in make(QUICK) if isinstance(case, Timed))


def test_a_goal_is_met_up_to_its_bound() -> None:
    case = Counted("a", "b", 27, 100, "bytes", 0.27)
    assert measure(case, 1) == (27, 100)
    assert bench.Row(case, 27, 100).verdict() == ("<= 0.27", "met")
    assert bench.Row(case, 28, 100).verdict() == ("<= 0.27", "missed")
    timed = Timed("a", "b", lambda: lambda: 1, lambda: lambda: 2)
    assert bench.Row(timed, 1, 2).verdict() == ("", "")


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-5)


def test_a_step_of_the_rivals_computes_the_same() -> None:
    lengths = [40, QUICK.slots]
    theirs = steps.jax_step(QUICK, lengths, jnp.float32)()
    for layout in (None, Paged(16)):
        close(steps.our_step(QUICK, lengths, jnp.float32, layout=layout)(), theirs)


@pytest.mark.full
def test_latents_and_loops_of_the_rivals_compute_the_same() -> None:
    ours, naive = latent.absorbed(QUICK, jnp.float32), latent.naive(QUICK, jnp.float32)
    for _ in range(2):  # the step takes back what it wrote
        close(ours(), naive())
    ours, plain = model.our_loop(QUICK, "float32"), model.plain_loop(QUICK, "float32")
    for _ in range(2):
        assert ours().tolist() == plain().tolist()


@pytest.mark.parametrize("kind", flash.BOUNDS)
def test_attention_of_the_rivals_computes_the_same(kind: str) -> None:
    same = functools.partial(flash.step, QUICK, 32, "float32", kind)
    for rival in (flash.of_jax, flash.of_flax):
        jax.tree.map(close, same(flash.ours(causal=True))(), same(rival)())
