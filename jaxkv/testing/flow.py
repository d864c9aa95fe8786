# SPDX-License-Identifier: Apache-2.0
"""Following arrays through a compiled program's HLO text: who copies, casts or moves them whole."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

# Give the same buffer on, or are looked into.
PASSING = {
    *("parameter", "tuple", "get-tuple-element", "bitcast", "optimization-barrier"),
    *("while", "conditional", "call", "fusion", "copy-done"),
    *("dynamic-update-slice", "scatter"),
}
# What comes out of these is no longer the array but something computed from it.
READING = {"dot", "convolution", "reduce", "reduce-window", "compare"}
# Only their first operand is data; the others say where.
INDEXED = {"dynamic-slice", "gather", "slice", "pad"}

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_NAMES = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(\w+)=(?:\{([^}]*)\}|%([\w.\-]+))")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_LABEL = re.compile(r'op_name="([^"]*)"')

# True: (part of) the array; a tuple of these for a tuple.
Mark = Any


@dataclasses.dataclass(frozen=True)
class Op:
    """One line of a program."""

    name: str
    kind: str
    type: str
    operands: tuple[str, ...]
    given: str  # what stands between the parentheses
    attributes: str
    root: bool

    @property
    def elements(self) -> int:
        """Elements of the result, of a tuple's largest part."""
        sizes = [d.split(",") for d in _SHAPE.findall(self.type)]
        return max((math.prod(int(n) for n in dims if n) for dims in sizes), default=0)

    @property
    def label(self) -> str:
        """The name of the argument or operation that it was traced from."""
        found = _LABEL.search(self.attributes)
        return found.group(1) if found else ""

    def called(self, *keys: str) -> list[str]:
        """Names the computations that stand under these attributes."""
        out = []
        for key, several, one in _CALLED.findall(self.attributes):
            if key in keys:
                out += _NAMES.findall(several) if several else [one]
        return out


def whole_moves(text: str, argument: str, elements: int) -> list[str]:
    """Lists the operations that make another version of an argument at its full size.

    The array is followed from the program's arguments through loops, branches and fusions. Views
    and in-place updates pass; a copy, cast, transpose, selection or anything else whose result
    has `elements` or more is listed. Matrix products and reductions read it: they end the trail.
    Where nothing else in a program is as large, `hlo.cache_sized_ops` needs no argument to follow.

    Args:
      text: Of `compiled.as_text()`.
      argument: Part of the names of the arguments to follow, such as `".planes["`.
      elements: The size from which on a result counts, in elements.

    Returns:
      One line for each operation found.

    Raises:
      ValueError: If no argument has such a name.
    """
    computations, entry = parse(text)
    marks = [argument in op.label for op in _parameters(computations[entry])]
    if not any(marks):
        raise ValueError(f"no argument is named {argument!r}: the check would pass for nothing.")
    follow = _Follow(computations, elements)
    follow.run(entry, tuple(marks))
    return list(follow.found)


def parse(text: str) -> tuple[dict[str, list[Op]], str]:
    """Reads a program: its computations, each a list of operations, and the entry's name."""
    computations: dict[str, list[Op]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        elif current is not None and (found := _LINE.match(line)):
            current.append(_op(found.group(2), found.group(3), bool(found.group(1))))
    return computations, entry


class _Follow:
    """Walks through computations with the arguments' marks, and collects what it finds."""

    def __init__(self, computations: dict[str, list[Op]], elements: int) -> None:
        self.computations, self.elements = computations, elements
        self.known: dict[tuple[str, tuple[Mark, ...]], Mark] = {}
        self.found: dict[str, None] = {}

    def run(self, name: str, arguments: tuple[Mark, ...]) -> Mark:
        if (name, arguments) in self.known:
            return self.known[name, arguments]
        marks: dict[str, Mark] = {}
        result: Mark = False
        for op in self.computations[name]:
            operands = [marks[n] for n in op.operands if n in marks]
            if op.kind == "parameter":
                marks[op.name] = arguments[int(op.given)]
            elif self._views(op, self.computations[name]):
                marks[op.name] = operands[0] if operands else False
            else:
                marks[op.name] = self._through(op, operands)
            if _any(marks[op.name]) and op.kind not in PASSING and op.elements >= self.elements:
                self.found[f"{op.kind} {op.name}: {op.type} in {name} ({op.label})"] = None
            if op.root:
                result = marks[op.name]
        self.known[name, arguments] = result
        return result

    def _through(self, op: Op, operands: list[Mark]) -> Mark:
        if op.kind in READING:
            return False
        if op.kind == "tuple":
            return tuple(operands)
        if op.kind == "get-tuple-element":
            index = int(re.findall(r"index=(\d+)", op.attributes)[0])
            return operands[0][index] if isinstance(operands[0], tuple) else operands[0]
        if op.kind == "while":
            return self._loop(op, operands[0])
        if op.kind == "conditional":
            branches = op.called("branch_computations", "true_computation", "false_computation")
            pairs = zip(branches, operands[1:], strict=True)
            return _joined([self.run(name, (given,)) for name, given in pairs])
        if called := op.called("calls", "to_apply") if op.kind in ("fusion", "call") else []:
            return self.run(called[0], tuple(operands))
        if op.kind in INDEXED:
            return _any(operands[0])
        return any(map(_any, operands))

    def _views(self, op: Op, computation: list[Op]) -> bool:
        """Says whether a fusion only names the same buffer by other tiles, for slices to take.

        XLA for TPU writes these as a copy whose result is its operand's buffer, inside the fusion
        that slices it; nothing else is made.
        """
        if op.kind != "fusion" or "output_to_operand_aliasing={{}: (0, {})}" not in op.attributes:
            return False
        body = [inner.kind for inner in self.computations[op.called("calls")[0]]]
        users = {user.kind for user in computation if op.name in user.operands}
        return body == ["parameter", "copy"] and users <= {"dynamic-slice", "dynamic-update-slice"}

    def _loop(self, op: Op, state: Mark) -> Mark:
        (body,) = op.called("body")
        while (after := _joined([state, self.run(body, (state,))])) != state:
            state = after
        return state


def _parameters(ops: list[Op]) -> list[Op]:
    return sorted((op for op in ops if op.kind == "parameter"), key=lambda op: int(op.given))


def _op(name: str, rest: str, root: bool) -> Op:
    rest = re.sub(r"/\*.*?\*/", "", rest)
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    kind, after = rest[end:].strip().split("(", 1)
    close = _closing("(" + after, 0) - 1
    given, attributes = after[: close - 1], after[close:]
    return Op(name, kind, rest[:end], tuple(_NAMES.findall(given)), given, attributes, root)


def _closing(text: str, start: int) -> int:
    """Finds the place after the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"unbalanced: {text[:80]}")


def _any(mark: Mark) -> bool:
    return any(map(_any, mark)) if isinstance(mark, tuple) else bool(mark)


def _joined(marks: list[Mark]) -> Mark:
    tuples = [m for m in marks if isinstance(m, tuple)]
    if not tuples:
        return any(marks)
    width = len(tuples[0])
    parts = [m if isinstance(m, tuple) else (m,) * width for m in marks]
    return tuple(_joined(list(column)) for column in zip(*parts, strict=True))
