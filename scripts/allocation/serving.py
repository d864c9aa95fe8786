# SPDX-License-Identifier: Apache-2.0
"""Continuous batching on the host: which requests run, on what the device reports."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from allocation.device import Figures, Rows, advance, create, misplaced, reset
from allocation.lengths import Mix
from allocation.policies import Policy

from jaxkv.cache import Paged

# A request starts only if this share of the pool stays free, so that those that run can grow.
SPARE = 0.03


@dataclasses.dataclass(frozen=True)
class Served:
    """What one run came to; means and peaks are over steps at which requests were waiting.

    Shares are of the slots given out: `waste` = `reserved` (slots that the request will fill
    later) + `internal` (slots that it never fills). `used` is the share of the whole pool that
    holds tokens.
    """

    steps: int
    tokens: int
    running: float
    waste: float
    peak_waste: float
    reserved: float
    internal: float
    used: float
    given_out: float
    preempted: int
    held_back: int


class Server:
    """One pool, one policy, and the requests that want to be served.

    Args:
      mix: What memory there is.
      policy: How it is given out.
      requests: int64 `[n, 2]`, tokens of prompt and output, all of them waiting at the start.
      chunk: Tokens of a prompt that a step appends at most.
      every: Steps of a row between two looks at the queue.
      look_every: How many such calls there are between two looks at all stored tokens.
    """

    def __init__(
        self,
        mix: Mix,
        policy: Policy,
        requests: np.ndarray,
        *,
        chunk: int,
        every: int,
        look_every: int = 32,
    ) -> None:
        if requests.sum(axis=1).max() > mix.longest:
            raise ValueError(f"a request is longer than {mix.longest} tokens.")
        self.mix, self.policy, self.chunk = mix, policy, chunk
        self.every, self.look_every = every, look_every
        self.cache = create(policy.layout, policy.rows, mix.longest)
        # Waiting: number, tokens of the prompt (with what was generated before), all tokens.
        self.waiting = deque((i, int(p), int(p + o)) for i, (p, o) in enumerate(requests))
        none = np.zeros(policy.rows, np.int32)
        self.request, self.prompt, self.total, self.reserved = (none.copy() for _ in range(4))
        self.active, self.lengths = none.astype(bool), none.copy()
        self.figures: list[tuple[bool, Figures]] = []
        self.preempted = self.finished = 0
        self.tokens = int(requests.sum())

    def run(self, report: Callable[[int], None] = lambda finished: None) -> Served:
        """Serves every request, and tells `report` how many are done.

        Raises:
          RuntimeError: If tokens, rows and pages do not add up, or a token is not where it belongs.
        """
        calls = 0
        while self.waiting or self.active.any():
            self._admit()
            self._advance()
            calls += 1
            if calls % self.look_every == 0:
                self._look()
            report(self.finished)
        return self._served()

    def _admit(self) -> None:
        """Starts waiting requests in their order, as long as there is a row and room."""
        spare = 0 if not isinstance(self.policy.layout, Paged) else int(SPARE * self.mix.pool)
        for row in np.flatnonzero(~self.active):
            if not self.waiting:
                return
            number, prompt, total = self.waiting[0]
            claim = self.policy.claim(prompt, total - prompt)
            alone = not self.active.any()
            if not alone and self._claimed() + claim + spare > self.mix.pool:
                return
            self.waiting.popleft()
            self.request[row], self.prompt[row], self.total[row] = number, prompt, total
            self.reserved[row], self.active[row], self.lengths[row] = claim, True, 0

    def _claimed(self) -> int:
        """Counts slots that are given out, or that rows still need for their prompts."""
        held = self.reserved
        if isinstance(self.policy.layout, Paged):
            size = self.policy.layout.size
            held = np.maximum(held, -(-self.lengths // size) * size)
        return int(held[self.active].sum())

    def _advance(self) -> None:
        """Runs steps on the device, and takes the youngest rows away if pages ran out."""
        queued = bool(self.waiting)
        self.cache, rows, figures = advance(self.cache, self._rows(), self.chunk, self.every)
        figures, lengths, active = jax.device_get((figures, self.cache.lengths, rows.active))
        if figures.faults.any():
            raise RuntimeError(f"{self.policy.name}: the books do not balance: {figures}.")
        self.figures.append((queued, figures))
        self.finished += int((self.active & ~active).sum())
        self.active, self.lengths = np.array(active), np.array(lengths)
        missing = int(figures.held_back[-1])
        if missing:
            self._preempt(missing)

    def _preempt(self, pages: int) -> None:
        """Puts the youngest requests back in front of the queue until `pages` pages are free."""
        size = self.policy.layout.size
        gone = np.zeros_like(self.active)
        for row in sorted(np.flatnonzero(self.active), key=lambda r: -self.request[r]):
            if pages <= 0 or (self.active & ~gone).sum() == 1:
                break
            pages -= -(-int(self.lengths[row]) // size)
            gone[row] = True
            # What was generated is kept, and appended again like a prompt.
            prompt = max(int(self.prompt[row]), int(self.lengths[row]))
            self.waiting.appendleft((int(self.request[row]), prompt, int(self.total[row])))
        self.preempted += int(gone.sum())
        self.cache = reset(self.cache, jnp.asarray(gone))
        self.active &= ~gone

    def _look(self) -> None:
        """Looks at every stored token."""
        wrong = int(misplaced(self.cache, self._rows()))
        if wrong:
            raise RuntimeError(f"{self.policy.name}: {wrong} tokens are not where they belong.")

    def _rows(self) -> Rows:
        host = self.request, self.prompt, self.total, self.reserved, self.active
        return Rows(*map(jnp.asarray, host))

    def _served(self) -> Served:
        busy = [f for queued, f in self.figures if queued] or [f for _, f in self.figures]
        figures = Figures(*(np.concatenate(x).astype(np.float64) for x in zip(*busy, strict=True)))
        every = Figures(
            *(np.concatenate(x) for x in zip(*(f for _, f in self.figures), strict=True))
        )
        held = figures.held.sum()
        waste = figures.held - figures.live
        reserved = figures.reserved.sum() / held
        at_work = every.running > 0
        return Served(
            steps=int(at_work.sum()),
            tokens=self.tokens,
            running=float(figures.running.mean()),
            waste=float(waste.sum() / held),
            peak_waste=float((waste / np.maximum(figures.held, 1)).max()),
            reserved=float(reserved),
            internal=float(waste.sum() / held - reserved),
            used=float(figures.live.mean() / self.mix.pool),
            given_out=float(figures.held.mean() / self.mix.pool),
            preempted=self.preempted,
            held_back=int(every.held_back.sum()),
        )
