# SPDX-License-Identifier: Apache-2.0
"""Whether a compiled step writes its cache in place: aliased, no copy of it, little besides."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Results that are another name for a buffer, or that are written into one of their operands.
IN_PLACE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "optimization-barrier"),
    *("while", "conditional", "call", "dynamic-update-slice", "scatter"),
}
# A step may use this much memory besides the cache, or this share of it.
LEAST_TEMP, TEMP_SHARE = 4 * 2**20, 0.05

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_OP = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_NAMES = re.compile(r"%([\w.\-]+)")
_BITS = re.compile(r"(\d+)")


class Op(NamedTuple):
    """One line of a program."""

    root: bool
    name: str
    type: str
    kind: str
    rest: str

    @property
    def nbytes(self) -> int:
        """Bytes of the result, of a tuple's largest part."""
        return max((_array_bytes(*array) for array in _ARRAY.findall(self.type)), default=0)

    @property
    def fusion(self) -> str | None:
        """Names the computation that a fusion runs."""
        called = _CALLED.search(self.rest)
        return called[1] if self.kind == "fusion" and called else None


Program = dict[str, list[Op]]


def cache_sized_ops(compiled: Any, nbytes: int) -> list[str]:
    """Lists what a program computes into new buffers that are as large as a cache plane.

    Args:
      compiled: A `jax.stages.Compiled`, or its text.
      nbytes: Size from which on a result counts, in bytes; usually of the smallest plane.

    Returns:
      The kind, name and shape of each copy, transpose, conversion, concatenation, collective and
      so on of that size. Updates in place are not listed, nor what stays inside a fusion.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    program = _parsed(text)
    fused = {op.fusion for ops in program.values() for op in ops}
    found = []
    for name, ops in program.items():
        for op in ops if name not in fused else ():
            for made in _results(op, program):
                if made.kind not in IN_PLACE and made.nbytes >= nbytes:
                    found.append(f"{made.kind} {op.name} {made.type}")
    return found


def assert_in_place(compiled: Any, cache: Any, extra: int = 0) -> None:
    """Fails unless a compiled step updates its donated cache where it lies.

    Args:
      compiled: The step, compiled with the cache donated and nothing else.
      cache: The cache, or its shapes; leaves with a sharding count for one device.
      extra: Bytes of activations that the step may use besides, for long calls.

    Raises:
      AssertionError: If the aliased bytes are not those of the whole cache, if temporaries take
        more than `max(4 MiB, 5 %)`, or if something of the size of a plane is copied.
    """
    leaves = [_device_bytes(x) for x in jax.tree.leaves(cache)]
    # Planes with channels: scales are small beside them.
    planes = [_device_bytes(x) for x in jax.tree.leaves(cache) if x.ndim > 3]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaves), (
        f"{memory.alias_size_in_bytes} bytes are aliased, the cache has {sum(leaves)}"
    )
    limit = max(LEAST_TEMP, int(TEMP_SHARE * sum(leaves))) + extra
    assert memory.temp_size_in_bytes <= limit, (
        f"{memory.temp_size_in_bytes} bytes of temporaries, want at most {limit}"
    )
    found = cache_sized_ops(compiled, min(planes))
    assert found == [], f"results as large as a plane ({min(planes)} bytes): {found}"


def _parsed(text: str) -> Program:
    """Reads the operations of each computation."""
    program: Program = {}
    ops: list[Op] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            ops = program.setdefault(header[1], [])
        elif op := _OP.match(line):
            ops.append(Op(bool(op[1]), *op.groups()[1:]))
    return program


def _results(op: Op, program: Program) -> list[Op]:
    """Finds what makes an operation's results: a fusion's roots, seen through bitcasts."""
    if op.fusion is None or op.fusion not in program:
        return [op]
    inner = {o.name: o for o in program[op.fusion]}
    made, waiting = [], [o for o in inner.values() if o.root]
    while waiting:
        root = waiting.pop()
        if root.kind not in ("tuple", "bitcast"):
            made.append(root)
            continue
        operands = _NAMES.findall(root.rest.split("), ")[0])
        waiting += [inner[name] for name in operands if name in inner]
    return made


def _array_bytes(dtype: str, shape: str) -> int:
    bits = _BITS.search(dtype)
    width = int(bits[1]) if bits else 8  # pred
    return math.prod(int(n) for n in shape.split(",") if n) * width // 8


def _device_bytes(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    shape = sharding.shard_shape(leaf.shape) if sharding is not None else leaf.shape
    dtype = jnp.dtype(leaf.dtype)
    whole = jnp.issubdtype(dtype, jnp.integer)  # numpy gives a 4-bit integer a whole byte
    bits = jnp.iinfo(dtype).bits if whole else 8 * dtype.itemsize
    return math.prod(shape) * bits // 8
