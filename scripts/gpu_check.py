# SPDX-License-Identifier: Apache-2.0
"""Holds attention on a GPU to its reference, and times it beside rivals, in under ten minutes.

    python scripts/gpu_check.py --output figures.json

It needs an NVIDIA GPU and `jaxkv[cuda13]`; `--dry` runs all of it at tiny sizes on a CPU, where
the rivals are plain. First the kernels for GPUs are compared with the reference, then the speeds
are measured (each rival in turn with ours, in this process), then the implementations for any
device are compared. What no time is left for is listed. A wrong result makes the exit status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.ops import api
from jaxkv.ops.blockwise import Blockwise
from jaxkv.ops.cudnn import CuDNN
from jaxkv.ops.einsum import Einsum
from jaxkv.ops.operands import Implementation
from jaxkv.ops.reference import Reference
from jaxkv.ops.triton import Triton

# Of a result of size 1: a 16-bit one is rounded up to four times on its way, and sums of products
# of 32-bit numbers are as long as a row.
LIMITS = {"bfloat16": 4 * 2.0**-8, "float16": 4 * 2.0**-11, "float32": 2.0**-16}
LSE_LIMIT = 2.0**-14
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "jaxkv")


@dataclasses.dataclass(frozen=True)
class Setting:
    """How large everything is, and on what."""

    dry: bool
    calls: int
    budget: float
    start: float = dataclasses.field(default_factory=time.monotonic)

    def over(self) -> bool:
        """Says whether no time is left to begin something new."""
        return time.monotonic() - self.start > self.budget

    def kernels(self) -> tuple[Implementation, ...]:
        """Lists the implementations for GPUs."""
        return (Triton(16, 16, interpret=True),) if self.dry else (CuDNN(), Triton())

    def plain(self) -> tuple[Implementation, ...]:
        """Lists those for any device."""
        return (Blockwise(rows=64, slots=64) if self.dry else Blockwise(), Einsum())

    def size(self, full: int, tiny: int) -> int:
        """Picks a size."""
        return tiny if self.dry else full

    def vendor(self) -> str:
        """Names what `jax.nn` shall compute with."""
        return "xla" if self.dry else "cudnn"

    def ours(self) -> Any:
        """Picks what computes ours: in earnest, whatever the library chooses."""
        return self.kernels()[0] if self.dry else None


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of attention: sizes, number format, and options."""

    name: str
    B: int
    T: int
    N: int
    K: int
    H: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: Any = jnp.bfloat16
    S: int = 0
    V: int = 0
    sinks: bool = False

    def arrays(self) -> dict[str, jax.Array]:
        """Draws the operands."""
        S, V = self.S or self.T, self.V or self.H
        shapes = {
            "query": (self.B, self.T, self.N, self.H),
            "key": (self.B, S, self.K, self.H),
            "value": (self.B, S, self.K, V),
        }
        keys = jax.random.split(jax.random.key(0), 4)
        arrays = {
            name: jax.random.normal(key, shape, jnp.float32).astype(self.dtype)
            for key, (name, shape) in zip(keys[:3], shapes.items(), strict=True)
        }
        return arrays | ({"sink_logits": jnp.linspace(-2.0, 2.0, self.N)} if self.sinks else {})


# --- Right -----------------------------------------------------------------------------------


def small_calls(s: Setting) -> Iterator[Call]:
    """Lists calls that together ask for every feature of the kernels, at sizes with remainders."""
    T, H = s.size(333, 20), s.size(64, 16)
    make = functools.partial(Call, B=2, T=T, N=4, K=2, H=H)
    even = functools.partial(Call, B=2, T=s.size(384, 32), N=4, K=2, H=s.size(128, 16))
    third = np.arange(T) * 3 // T
    documents = jnp.asarray(np.stack([third + 1, np.where(third == 1, 0, 1)]), jnp.int32)
    lengths = jnp.asarray([0, s.size(200, 20)], jnp.int32)
    mask = jnp.arange(even("").T)[:, None] % 7 != jnp.arange(even("").T)[None] % 5
    yield even("causal", options={"causal": True})
    yield even("causal float16", options={"causal": True}, dtype=jnp.float16)
    yield even("full, more keys", S=s.size(512, 48))
    yield even("window", options={"causal": True, "window": s.size(100, 9)})
    yield even("key lengths", options={"causal": True, "key_lengths": lengths})
    yield even("mask", options={"mask": mask.at[5].set(False)})
    yield even("sinks", options={"causal": True}, sinks=True)
    yield make("documents", options={"causal": True, "query_segments": documents})
    yield make("both sides", options={"window": (s.size(50, 5), 3), "offset": 0})
    yield make("soft-cap", options={"causal": True, "soft_cap": 5.0})
    yield make("offsets", options={"causal": True, "offset": jnp.asarray([9, -7])})
    yield make("pinned", options={"causal": True, "window": 16, "pinned": 4})
    yield make("float32", options={"causal": True}, dtype=jnp.float32)
    yield make("192 and 128 wide", H=s.size(192, 24), V=s.size(128, 16), options={"causal": True})
    yield make("256 wide", H=s.size(256, 32), options={"causal": True})


def compare(call: Call, one: Implementation) -> dict[str, Any]:
    """Holds outputs, log-sum-exps and gradients of an implementation to the reference's."""
    arrays = call.arrays()
    B, T, N, V = call.B, call.T, call.N, call.V or call.H
    bars = (
        jax.random.normal(jax.random.key(1), (B, T, N, V), jnp.float32).astype(call.dtype),
        jax.random.normal(jax.random.key(2), (B, T, N), jnp.float32),
    )

    def program(how: Implementation) -> Callable[..., Any]:
        def run(arrays: Any, bars: Any) -> Any:
            outs, pull = jax.vjp(
                lambda a: api.attention(**a, **call.options, implementation=how, return_lse=True),
                arrays,
            )
            return outs, pull(bars)[0]

        return jax.jit(run)

    row = {"call": call.name, "implementation": one.name}
    operands = api.prepare(**arrays, **call.options)
    if refused := one.refuses(operands):
        return row | {"refused": refused}
    try:
        (out, lse), grads = jax.device_get(program(one)(arrays, bars))
    except Exception as failure:  # the other implementations shall still be seen
        return row | {"right": False, "failure": str(failure)[:300]}
    (out_want, lse_want), grads_want = jax.device_get(program(Reference())(arrays, bars))
    blind = np.isneginf(lse_want)
    errors = {"out": _error(out, out_want), "lse": _error(lse[~blind], lse_want[~blind])}
    errors |= {f"d {n}": _error(g, grads_want[n]) for n, g in grads.items()}
    limit = LIMITS[jnp.dtype(call.dtype).name]
    right = all(e <= (LSE_LIMIT if n == "lse" else limit) for n, e in errors.items())
    right &= bool(np.isneginf(lse[blind]).all()) and not np.asarray(out[blind]).any()
    return row | {"right": right, "errors": {n: float(e) for n, e in errors.items()}}


def _error(got: Any, want: Any) -> float:
    """Measures the largest error relative to the largest value, or to 1; NaN is infinite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not got.size:
        return 0.0
    error = np.abs(got - want).max() / max(1.0, np.abs(want).max())
    return float(error) if np.isfinite(error) else float("inf")


# --- Fast ------------------------------------------------------------------------------------

Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Race:
    """Ours beside a rival: how many times as fast it should be."""

    goal: int
    call: Call
    how: Any
    rival: str
    bound: float
    ours: Callable[[Call, Any], Step]
    theirs: Callable[[], Step]


def races(s: Setting) -> Iterator[Race]:
    """Lists the speeds that are goals: 16 (forward), 17 (backward) and 19 (masks)."""
    causal = {"causal": True}
    T, long = s.size(4096, 64), s.size(16384, 128)
    b, n = s.size(4, 1), s.size(16, 2)
    wide, narrow = s.size(128, 32), s.size(64, 16)
    plain = Call("causal", b, T, n, n, wide, causal)
    far = Call("causal, long", 1, long, n, n, wide, causal)
    thin = Call("causal, narrow", b, T, 2 * n, 2 * n, narrow, causal)
    fat = Call("causal, wide", b, T, s.size(8, 2), s.size(8, 2), s.size(256, 64), causal)
    for call, bound in ((plain, 0.9), (far, 0.9), (thin, 0.85)):
        for how in dict.fromkeys((s.ours(), s.kernels()[-1])):
            yield Race(
                *(16, call, how, "jax.nn", bound, forward),
                functools.partial(vendor_forward, call, s.vendor(), None),
            )
    for call, bound in ((plain, 1.2), (thin, 1.2), (fat, 1.0)):
        for how in dict.fromkeys((s.ours(), s.kernels()[-1])):
            yield Race(
                *(17, call, how, "Pallas mha", bound, backward),
                functools.partial(pallas_backward, call, s.dry),
            )
    T = s.size(8192, 64)
    document = jnp.arange(T)[None] // (T // 8) + 1
    packed = Call("8 documents", 1, T, n, n, wide, causal | {"query_segments": document})
    near = Call("window of an eighth", 1, T, n, n, wide, causal | {"window": T // 8})
    thin = dataclasses.replace(near, name="the same, narrow", N=2 * n, K=2 * n, H=narrow)
    for call in (packed, near, thin):
        for how in dict.fromkeys((s.ours(), s.kernels()[-1])):
            yield Race(
                *(19, call, how, "jax.nn, mask", 2.0, forward),
                functools.partial(vendor_forward, call, s.vendor(), dense_mask(call)),
            )


def dense_mask(call: Call) -> jax.Array:
    """Writes a call's rule out as a mask `[1, 1, T, T]`."""
    at = jnp.arange(call.T)
    mask = at[:, None] >= at[None]
    if "window" in call.options:
        mask &= at[None] > at[:, None] - call.options["window"]
    if "query_segments" in call.options:
        segments = call.options["query_segments"][0]
        mask &= segments[:, None] == segments[None]
    return mask[None, None]


def forward(call: Call, how: Any) -> Step:
    """Times the output alone."""
    fn = jax.jit(lambda a: api.attention(**a, **call.options, implementation=how))
    return functools.partial(fn, call.arrays())


def vendor_forward(call: Call, name: str, mask: jax.Array | None) -> Step:
    """Times `jax.nn`, causal by itself or by a mask."""
    fn = jax.nn.dot_product_attention
    fn = functools.partial(fn, is_causal=mask is None, implementation=name)
    return functools.partial(jax.jit(lambda a, m: fn(**a, mask=m)), call.arrays(), mask)


def pulled(fn: Callable[..., jax.Array], call: Call) -> Step:
    """Times the backward pass of a function of query, key and value."""
    arrays = call.arrays()
    out, pull = jax.jit(lambda a: jax.vjp(fn, *a))(tuple(arrays.values()))
    return functools.partial(jax.jit(lambda pull, bar: pull(bar)), pull, out)


def backward(call: Call, how: Any) -> Step:
    """Times our gradient by query, key and value."""

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return api.attention(q, k, v, **call.options, implementation=how)

    return pulled(ours, call)


def pallas_backward(call: Call, interpret: bool) -> Step:
    """Times the gradient of the example kernel that comes with JAX."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention as pallas
    block = 128 if call.H <= 128 else 64
    sizes = dataclasses.replace(
        pallas.BlockSizes.get_default(), block_q=block, block_k=min(block, 64)
    )

    def theirs(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return pallas.mha(
            *(q, k, v, None),
            sm_scale=call.H**-0.5,
            causal=True,
            block_sizes=sizes,
            interpret=interpret,
        )

    return pulled(theirs, call)


def run_race(race: Race, calls: int) -> dict[str, Any]:
    """Times both in turn: medians in milliseconds."""
    c = race.call
    row = {"goal": race.goal, "call": c.name, "shape": [c.B, c.T, c.N, c.K, c.H]}
    ours = "chosen" if race.how is None else race.how.name
    row |= {"rival": race.rival, "bound": race.bound, "ours": ours}
    try:
        steps = race.ours(c, race.how), race.theirs()
        for step in steps * 2:
            jax.block_until_ready(step())
    except Exception as failure:  # a kernel that does not fit this GPU is a finding too
        return row | {"failure": str(failure)[:300]}
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(calls):
        for step, log in zip(steps, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(step())
            log.append((time.perf_counter() - start) * 1e3)
    mine, other = (statistics.median(log) for log in times)
    speed = other / mine
    return row | {"ms": mine, "rival_ms": other, "speed": speed, "met": speed >= race.bound}


# --- All of it -------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """Tells the device and the versions."""
    device = jax.devices()[0]
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    backend = str(getattr(device.client, "platform_version", "")).strip()
    return {"device": device.device_kind, "backend": backend, "versions": versions}


def said(row: dict[str, Any]) -> str:
    """Writes one result as a line."""
    if "goal" in row:
        name = f"goal {row['goal']}  {row['call']:<22} {row['ours']:<9} beside {row['rival']:<13}"
        if "failure" in row:
            return f"{name} failed: {row['failure']}"
        met = "met" if row["met"] else "missed"
        times = f"{row['ms']:8.3f} ms, {row['rival_ms']:8.3f} ms"
        return f"{name} {times}: {row['speed']:.2f} x, goal {row['bound']:.2f} x, {met}"
    name = f"{row['call']:<22} {row['implementation']:<9}"
    if "refused" in row:
        return f"{name} {row['refused']}"
    if "failure" in row:
        return f"{name} FAILED: {row['failure']}"
    worst = max(row["errors"], key=row["errors"].get)
    verdict = "right" if row["right"] else "WRONG"
    return f"{name} {verdict}, worst {worst} {row['errors'][worst]:.1e}"


def check(s: Setting) -> dict[str, Any]:
    """Runs everything that there is time for, and prints it as it comes."""
    calls = list(small_calls(s))
    kernels = [functools.partial(compare, c, one) for one in s.kernels() for c in calls]
    speeds = [functools.partial(run_race, race, s.calls) for race in races(s)]
    rest = [functools.partial(compare, c, one) for one in s.plain() for c in calls]
    report: dict[str, Any] = {**facts(), "results": [], "left_out": 0}
    for job in kernels + speeds + rest:
        if s.over():
            report["left_out"] += 1
            continue
        precision = "default" if job.func is run_race else "highest"
        with jax.default_matmul_precision(precision):
            row = job()
        report["results"].append(row)
        print(said(row), flush=True)
    report["wrong"] = sum(row.get("right") is False for row in report["results"])
    report["seconds"] = round(time.monotonic() - s.start)
    return report


def main(arguments: list[str] | None = None) -> int:
    """Runs the check; gives 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each")
    parser.add_argument("--budget", type=float, default=420, help="begin nothing after, seconds")
    parser.add_argument("--output", type=Path, help="write everything as JSON here")
    given = parser.parse_args(arguments)
    if not given.dry and jax.default_backend() != "gpu":
        parser.error(f"JAX finds no GPU here ({jax.default_backend()} only): want --dry.")
    report = check(Setting(given.dry, given.calls, given.budget))
    print(f"{report['device']}, {report['versions']}: {report['wrong']} wrong,", end=" ")
    print(f"{report['left_out']} left out, {report['seconds']} s")
    if given.output is not None:
        given.output.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
