# SPDX-License-Identifier: Apache-2.0
"""A plan as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from jaxkv.memory.planner import Fit, Group, Plan
from jaxkv.memory.units import DECIMAL, format_bytes


def tables(plan: Plan) -> Iterator[Table]:
    """Lays a plan out: layers by what they keep, then sizes, then what fits."""
    yield _layers(plan)
    yield _sizes(plan)
    if plan.fit is not None:
        yield _fits(plan, plan.fit)


def both_units(count: int) -> str:
    """Writes a size in binary and decimal units.

    >>> both_units(2**30)
    '1.000 GiB = 1.074 GB'
    """
    binary, decimal = format_bytes(count), format_bytes(count, DECIMAL)
    return binary if binary == decimal else f"{binary} = {decimal}"


def _layers(plan: Plan) -> Table:
    title = f"{plan.geometry.name}: what its layers keep, {plan.storage.dtype}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("layers", "kind", "record of a token"):
        table.add_column(column)
    for column in ("B/token, each", "B/token, all", "slots", "sequence"):
        table.add_column(column, justify="right")
    for group in plan.groups:
        table.add_row(
            str(group.count),
            _kind(group),
            _record(group),
            f"{group.bytes_per_token:,}",
            f"{group.count * group.bytes_per_token:,}",
            f"{group.slots:,}" if group.layer.spec else "-",
            format_bytes(group.count * group.sequence_bytes),
        )
    table.add_section()
    total = f"{plan.bytes_per_token:,}"
    layers = str(len(plan.geometry.layers))
    table.add_row(layers, "all", "", "", total, "", format_bytes(plan.sequence_bytes), style="bold")
    return table


def _kind(group: Group) -> str:
    window = group.layer.window
    return group.layer.kind if window is None else f"{group.layer.kind} {window:,}"


def _record(group: Group) -> str:
    spec = group.layer.spec
    if spec is None and group.layer.source is not None:
        return f"that of layer {group.layer.source}"
    if spec is None:
        return "nothing" if group.layer.kind == "shared" else "a fixed state"
    shared = f" + {spec.shared_width} shared" if spec.shared_width else ""
    if spec.value_offset is not None:
        return f"{spec.kv_heads} x {spec.key_width}{shared} (latent)"
    return f"{spec.kv_heads} x ({spec.key_width} + {spec.value_width}){shared}"


def _sizes(plan: Plan) -> Table:
    title = f"Context {plan.context:,} tokens, batch {plan.batch:,}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("cache")
    table.add_column("whole model", justify="right")
    divided = plan.data * plan.tensor > 1
    if divided:
        table.add_column(f"per device (data {plan.data}, tensor {plan.tensor})", justify="right")

    def row(name: str, whole: int, part: int) -> None:
        cells = [both_units(whole), both_units(part)] if divided else [both_units(whole)]
        table.add_row(name, *cells)

    device = plan.device
    row("bytes per token", plan.bytes_per_token, device.bytes_per_token)
    row("bytes per sequence", plan.sequence_bytes, device.sequence_bytes)
    row("all arrays of the batch (nbytes)", plan.nbytes, device.nbytes)
    if plan.storage.chip is not None:
        name = f"the same in {plan.storage.chip.name} memory (physical_nbytes)"
        row(name, plan.physical_nbytes, device.physical_nbytes)
    if plan.per_head_bytes_per_token != plan.bytes_per_token:
        ratio = plan.per_head_bytes_per_token / plan.bytes_per_token
        table.add_section()
        text = f"{both_units(plan.per_head_bytes_per_token)} ({ratio:.1f} times)"
        name = "per token, if every query head had a KV head"
        table.add_row(name, text, *([""] if divided else []), style="dim")
    return table


def _fits(plan: Plan, fit: Fit) -> Table:
    chip = plan.storage.chip
    title = f"What fits on {'' if chip is None else chip.label}"
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    known = "unknown" if plan.weight_bytes is None else both_units(fit.weight_bytes)
    table.add_row("memory per device", both_units(fit.memory_bytes))
    table.add_row("weights per device", known)
    table.add_row(
        "left for the cache", both_units(fit.free_bytes) if fit.free_bytes > 0 else "none"
    )
    table.add_row(f"sequences of {plan.context:,} tokens", _limit(fit.sequences_per_device))
    if plan.data > 1:
        table.add_row(f"on {plan.data} x {plan.tensor} devices", _limit(fit.sequences))
    table.add_row("longest single sequence", _limit(fit.longest_context, " tokens"))
    return table


def _limit(count: int | None, unit: str = "") -> str:
    return "no limit" if count is None else f"{count:,}{unit}"
