# SPDX-License-Identifier: Apache-2.0
"""The allocation simulation at tiny size: what must add up, and faults that it must see."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import simulate_allocation
from allocation.lengths import MIXES, Lengths, Mix
from allocation.policies import Policy, policies
from allocation.serving import Served, Server

from jaxkv.cache import Index, Paged, Plan

TINY = Mix("tiny", "made up", Lengths(6, 0.8, 30), Lengths(9, 0.8, 30), 60, 240, 24)
REQUESTS = TINY.draw(50, 3)


def server(policy: Policy, requests: np.ndarray = REQUESTS) -> Server:
    return Server(TINY, policy, requests, chunk=8, every=4, look_every=2)


def steps_of(run: Server) -> dict[str, np.ndarray]:
    names = run.figures[0][1]._fields
    return {n: np.concatenate([getattr(f, n) for _, f in run.figures]) for n in names}


def served_tokens(run: Server, served: Served) -> None:
    """Checks what holds of every policy, from what the steps reported."""
    steps = steps_of(run)
    assert run.finished == len(REQUESTS) and not run.active.any()
    assert (steps["held"] <= TINY.pool).all() and (steps["live"] <= steps["held"]).all()
    assert (steps["live"] + steps["reserved"] <= steps["held"]).all()
    assert not np.asarray(run.cache.lengths).any()
    assert served.tokens == REQUESTS.sum()
    assert served.waste == pytest.approx(served.reserved + served.internal)


@pytest.mark.parametrize("size", [4, 10])
def test_pages_waste_at_most_one_partial_page_a_row(size: int) -> None:
    policy = policies(TINY, (size,))[-1]
    run = server(policy)
    served = run.run()
    served_tokens(run, served)
    steps = steps_of(run)
    assert (steps["held"] - steps["live"] <= steps["running"] * (size - 1)).all()
    assert not np.asarray(run.cache.index.state.references).any()
    # The pool is small: pages did run out, rows waited, and nothing was lost of it.
    assert served.held_back > 0 and served.preempted > 0
    again = server(policy)
    assert again.run() == served


def test_reservations_hold_what_they_set_aside() -> None:
    by_name = {p.name: p for p in policies(TINY, ())}
    runs = {name: server(policy) for name, policy in by_name.items()}
    done = {name: run.run() for name, run in runs.items()}
    for name, run in runs.items():
        served_tokens(run, done[name])
        assert done[name].held_back == done[name].preempted == 0
    steps = steps_of(runs["longest"])
    np.testing.assert_array_equal(steps["held"], 60 * steps["running"])
    assert steps["running"].max() == 4
    assert done["oracle"].internal == 0
    assert done["oracle"].waste < done["power of two"].waste < done["longest"].waste


def test_requests_longer_than_the_longest_are_refused() -> None:
    with pytest.raises(ValueError, match="longer than 60"):
        server(policies(TINY, ())[0], np.array([[40, 30]]))


@dataclasses.dataclass(frozen=True)
class Leaking(Paged):
    """Forgets to free pages."""

    def reset(self, index: Index, rows: jax.Array) -> Index:
        freed = super().reset(index, rows)
        kept = dataclasses.replace(freed.state, references=index.state.references)
        return dataclasses.replace(freed, state=kept)


@dataclasses.dataclass(frozen=True)
class Misplacing(Paged):
    """Writes into the page after the one that was given out."""

    def plan(self, index: Index, slots: int, length: int, count: jax.Array) -> Plan:
        plan = super().plan(index, slots, length, count)
        jobs = dataclasses.replace(plan.jobs, entry=(plan.jobs.entry + 1) % self.pages)
        return dataclasses.replace(plan, jobs=jobs)


@pytest.mark.parametrize(
    ("layout", "message"), [(Leaking, "do not balance"), (Misplacing, "not where they belong")]
)
def test_a_faulty_allocator_is_seen(layout: Any, message: str) -> None:
    good = policies(TINY, (4,))[-1]
    policy = dataclasses.replace(good, layout=layout(4, pages=60))
    with pytest.raises(RuntimeError, match=message):
        server(policy, REQUESTS[:20]).run()


@pytest.mark.parametrize("mix", MIXES, ids=lambda m: m.name)
def test_lengths_have_the_published_means(mix: Mix) -> None:
    drawn = mix.draw(20_000, 1)
    for lengths, column in ((mix.prompt, drawn[:, 0]), (mix.output, drawn[:, 1])):
        assert column.mean() == pytest.approx(lengths.mean, rel=0.03)
        assert column.min() >= 1 and column.max() <= lengths.limit
    assert drawn.sum(axis=1).max() <= mix.longest and mix.pool % mix.longest == 0
    np.testing.assert_array_equal(drawn, mix.draw(20_000, 1))


def test_the_script_writes_a_table_a_picture_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate_allocation.main(12, 0, ["instructions"], [64], 32, 8, tmp_path)
    printed = capsys.readouterr().out
    assert "pages of 64" in printed and "instructions" in printed
    found = json.loads((tmp_path / "allocation.json").read_text())
    assert [r["policy"] for r in found["runs"]] == [
        "longest",
        "power of two",
        "oracle",
        "pages of 64",
    ]
    assert found["seed"] == 0 and found["mixes"]["instructions"]["pool"] == 4096
    assert (tmp_path / "allocation.png").stat().st_size > 10_000
