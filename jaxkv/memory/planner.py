# SPDX-License-Identifier: Apache-2.0
"""Plans a model's cache: bytes per token, per row and per device, and what fits on a chip."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

from jaxkv.cache.index import Layout
from jaxkv.memory.chips import Chip
from jaxkv.memory.counting import Storage, device_part, replicated
from jaxkv.memory.formats import is_scaled
from jaxkv.memory.policy import SlotPolicy, row_slots
from jaxkv.memory.units import format_bytes
from jaxkv.models.geometry import LayerSpec, ModelGeometry

AXES = ("data", "tensor")
# Bytes of a parameter where the size of the weights is not given (bfloat16).
WEIGHT_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers that keep the same: how many, and what one of them costs.

    Attributes:
      layer: One of them.
      layout: Where its tokens go; `None` if it keeps none.
      count: How many there are.
      slots: Slots of one row, in tokens.
      bytes_per_token: Of one layer, as specified.
      sequence_bytes: Of one layer and row: its slots, of a pool its pages, and its fixed state.
    """

    layer: LayerSpec
    layout: Layout | None
    count: int
    slots: int
    bytes_per_token: int
    sequence_bytes: int


@dataclasses.dataclass(frozen=True)
class Share:
    """What the fullest device holds of the cache.

    Attributes:
      rows: Rows of the batch.
      bytes_per_token: Of one row, all layers, as specified.
      sequence_bytes: Of one row at the plan's context, as specified.
      nbytes: Arrays of all its rows.
      physical_nbytes: The same as it lies in the chip's memory.
    """

    rows: int
    bytes_per_token: int
    sequence_bytes: int
    nbytes: int
    physical_nbytes: int


@dataclasses.dataclass(frozen=True)
class Fit:
    """What a chip has room for beside the weights.

    Attributes:
      memory_bytes: Memory of one device.
      weight_bytes: Weights on one device.
      sequences_per_device: Rows at the plan's context that one device's memory holds, `None` if
        they take none of it.
      sequences: Rows that the whole mesh holds, likewise.
      longest_context: Tokens of a single row, `None` if its cache does not grow.
    """

    memory_bytes: int
    weight_bytes: int
    sequences_per_device: int | None
    sequences: int | None
    longest_context: int | None

    @property
    def free_bytes(self) -> int:
        """What the weights leave of one device's memory; negative if they do not fit."""
        return self.memory_bytes - self.weight_bytes


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one model's cache costs in one setting.

    Attributes:
      geometry: The model.
      context: Tokens of every row.
      batch: B, rows.
      storage: How records are stored, layouts and chip.
      data: Devices that rows are divided over.
      tensor: Devices that KV heads are divided over.
      groups: Layers by what they keep, in order of their first layer.
      bytes_per_token: Records as specified, all layers.
      per_head_bytes_per_token: The same if every query head had a KV head of its own.
      sequence_bytes: One row at `context`, records as specified, all layers.
      nbytes: Every array for the whole batch, index and lane padding included.
      physical_nbytes: The same as it lies in the chip's memory, tiles included.
      device: The fullest device's share.
      weight_bytes: Weights of the whole model, `None` if not known.
      fit: What the chip has room for, `None` without a chip.
      notes: What a reader should know, a sentence each.
    """

    geometry: ModelGeometry
    context: int
    batch: int
    storage: Storage
    data: int
    tensor: int
    groups: tuple[Group, ...]
    bytes_per_token: int
    per_head_bytes_per_token: int
    sequence_bytes: int
    nbytes: int
    physical_nbytes: int
    device: Share
    weight_bytes: int | None
    fit: Fit | None
    notes: tuple[str, ...]


def plan(
    geometry: ModelGeometry,
    *,
    context: int | None = None,
    batch: int = 1,
    dtype: str = "bfloat16",
    devices: Mapping[str, int] | None = None,
    chip: Chip | None = None,
    policy: str | SlotPolicy = "window",
    weight_bytes: int | None = None,
) -> Plan:
    """Counts what the cache of a model costs.

    Args:
      geometry: What each layer keeps.
      context: Tokens of every row; `None` is the model's own limit.
      batch: B, rows.
      dtype: How a record is stored, as in `Storage`.
      devices: Mesh axis -> devices, axes `data` (divides rows) and `tensor` (divides KV heads).
      chip: Adds its padding, and what fits into its memory.
      policy: What layers keep: `window`, `full`, `pages:Z` or another form of `SlotPolicy.parse`.
      weight_bytes: Bytes of all weights; `None` takes 2 per parameter (bfloat16).

    Raises:
      ValueError: If a number is below 1, an axis, dtype or policy is unknown, heads and tensor
        devices do not divide, or a pool of pages does not over data devices.

    >>> from jaxkv.models.presets import load_geometry
    >>> llama = plan(load_geometry("llama2-70b"), context=4096, devices={"tensor": 16})
    >>> llama.bytes_per_token, llama.device.bytes_per_token
    (327680, 40960)
    """
    data, tensor = _mesh(devices or {}, geometry)
    context = geometry.max_context if context is None else context
    if context < 1 or batch < 1:
        raise ValueError(f"context {context} and batch {batch} are at least 1.")
    policy = policy if isinstance(policy, SlotPolicy) else SlotPolicy.parse(policy)
    storage = Storage(dtype, policy, chip)
    each = dataclasses.replace(storage, policy=policy.divided(data))
    part, whole, rows = (
        device_part(geometry, tensor),
        replicated(geometry, tensor),
        -(-batch // data),
    )
    if weight_bytes is None and geometry.parameters is not None:
        weight_bytes = WEIGHT_BYTES * geometry.parameters
    return Plan(
        geometry=geometry,
        context=context,
        batch=batch,
        storage=storage,
        data=data,
        tensor=tensor,
        groups=tuple(_groups(geometry, storage, context)),
        bytes_per_token=storage.token_bytes(geometry),
        per_head_bytes_per_token=storage.token_bytes(geometry.per_head()),
        sequence_bytes=storage.row_bytes(geometry, context),
        nbytes=storage.nbytes(whole, batch, context),
        physical_nbytes=storage.physical_nbytes(whole, batch, context),
        device=Share(
            rows=rows,
            bytes_per_token=each.token_bytes(part),
            sequence_bytes=each.row_bytes(part, context),
            nbytes=each.nbytes(part, rows, context),
            physical_nbytes=each.physical_nbytes(part, rows, context),
        ),
        weight_bytes=weight_bytes,
        fit=_fit(part, each, context, data, tensor, weight_bytes),
        notes=tuple(_notes(geometry, storage, context, batch, data, tensor, weight_bytes)),
    )


def _mesh(devices: Mapping[str, int], geometry: ModelGeometry) -> tuple[int, int]:
    strange = sorted(set(devices) - set(AXES))
    if strange:
        raise ValueError(f"unknown device axes {strange}, want {list(AXES)}.")
    data, tensor = (devices.get(axis, 1) for axis in AXES)
    if min(data, tensor) < 1:
        raise ValueError(f"devices {dict(devices)}: want at least 1 on each axis.")
    for layer in geometry.layers:
        if layer.num_heads % tensor:
            raise ValueError(
                f"{geometry.name}: {layer.num_heads} query heads do not divide over {tensor} "
                "tensor devices."
            )
    return data, tensor


def _groups(geometry: ModelGeometry, storage: Storage, context: int) -> Iterator[Group]:
    layers, policy = geometry.layers, storage.policy
    kinds = zip(layers, policy.layouts(layers), policy.of_row().layouts(layers), strict=True)
    for (layer, layout, own), count in Counter(kinds).items():
        yield Group(
            layer,
            layout,
            count,
            row_slots(own, context),
            storage.layer_token_bytes(layer),
            storage.layer_row_bytes(layer, own, context),
        )


def _fit(
    part: ModelGeometry,
    storage: Storage,
    context: int,
    data: int,
    tensor: int,
    weight_bytes: int | None,
) -> Fit | None:
    if storage.chip is None:
        return None
    memory, weights = storage.chip.device_bytes, -(-(weight_bytes or 0) // tensor)
    free = max(memory - weights, 0)
    each = storage.most_rows(part, context, free)
    every = None if each is None else each * data
    return Fit(memory, weights, each, every, storage.longest_context(part, free))


def _notes(
    geometry: ModelGeometry,
    storage: Storage,
    context: int,
    batch: int,
    data: int,
    tensor: int,
    weight_bytes: int | None,
) -> Iterator[str]:
    stored = {layer.spec for layer in geometry.layers if layer.spec is not None}
    for spec in sorted(stored, key=lambda spec: spec.kv_heads):
        if tensor > 1 and spec.value_offset is not None and spec.kv_heads == 1:
            yield (
                f"The latent record has no heads to divide: each of {tensor} tensor devices holds "
                "all of it."
            )
        elif spec.kv_heads < tensor:
            yield (
                f"{spec.kv_heads} KV heads on {tensor} tensor devices: each head is stored "
                f"{tensor // spec.kv_heads} times."
            )
    if batch < data:
        yield f"{batch} rows on {data} data devices: a row is never divided, so some hold none."
    yield from _storage_notes(geometry, storage, context, data)
    if context > geometry.max_context:
        yield f"{context:,} tokens are more than the model was made for ({geometry.max_context:,})."
    if storage.chip is not None:
        yield from _chip_notes(storage.chip, tensor, geometry.parameters, weight_bytes)


def _storage_notes(
    geometry: ModelGeometry, storage: Storage, context: int, data: int
) -> Iterator[str]:
    token = storage.token_bytes(geometry)
    readers = sum(layer.kind == "shared" for layer in geometry.layers)
    if readers:
        yield f"{readers} layers read what others keep, which is counted once."
    yield from storage.policy.notes(geometry.layers, context, data)
    if is_scaled(storage.dtype) and token:
        ratio = Storage("bfloat16").token_bytes(geometry) / token
        yield f"{storage.dtype}: a token, with scales, is {ratio:.3f} times smaller than in bf16."


def _chip_notes(
    chip: Chip, tensor: int, parameters: int | None, weight_bytes: int | None
) -> Iterator[str]:
    yield "What fits leaves no room for activations and compiler buffers."
    if chip.devices > 1:
        yield (
            f"A {chip.name} is {chip.devices} JAX devices with {format_bytes(chip.device_bytes)} "
            "each; figures are per device."
        )
    if weight_bytes is None:
        yield "The parameter count is not known, so the whole memory counts as free."
    elif parameters is not None and weight_bytes == WEIGHT_BYTES * parameters:
        divided = f", divided over {tensor} devices" if tensor > 1 else ""
        yield f"Weights are {parameters:,} parameters of {WEIGHT_BYTES} bytes{divided}."
    if weight_bytes is not None and weight_bytes > tensor * chip.device_bytes:
        yield (
            f"The weights alone ({format_bytes(weight_bytes)}) do not fit {tensor} of these "
            "devices."
        )
