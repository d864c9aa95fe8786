# SPDX-License-Identifier: Apache-2.0
"""A plan as plain data, for JSON."""

from __future__ import annotations

from typing import Any

from jaxkv.memory.counting import Storage
from jaxkv.memory.planner import Group, Plan


def as_dict(plan: Plan) -> dict[str, Any]:
    """Turns a plan into plain data; every size is in bytes.

    The first `bytes_per_token` is that of the whole model in bfloat16, whatever the plan's dtype.

    >>> from jaxkv.memory.planner import plan
    >>> from jaxkv.models.presets import load_geometry
    >>> list(as_dict(plan(load_geometry("gpt2-xl"), dtype="float32")).items())[:3]
    [('model', 'gpt2-xl'), ('bytes_per_token', 307200), ('bytes_per_token_dtype', 'bfloat16')]
    """
    chip, device, fit = plan.storage.chip, plan.device, plan.fit
    return {
        "model": plan.geometry.name,
        "bytes_per_token": Storage("bfloat16").token_bytes(plan.geometry),
        "bytes_per_token_dtype": "bfloat16",
        "context": plan.context,
        "batch": plan.batch,
        "dtype": plan.storage.dtype,
        "windows": str(plan.storage.policy),
        "devices": {"data": plan.data, "tensor": plan.tensor},
        "chip": None if chip is None else chip.label,
        "cache": {
            "bytes_per_token": plan.bytes_per_token,
            "per_head_bytes_per_token": plan.per_head_bytes_per_token,
            "bytes_per_sequence": plan.sequence_bytes,
            "nbytes": plan.nbytes,
            "physical_nbytes": plan.physical_nbytes,
        },
        "per_device": {
            "rows": device.rows,
            "bytes_per_token": device.bytes_per_token,
            "bytes_per_sequence": device.sequence_bytes,
            "nbytes": device.nbytes,
            "physical_nbytes": device.physical_nbytes,
        },
        "layers": [_group(group) for group in plan.groups],
        "parameters": plan.geometry.parameters,
        "weight_bytes": plan.weight_bytes,
        "fit": None
        if fit is None
        else {
            "memory_bytes_per_device": fit.memory_bytes,
            "weight_bytes_per_device": fit.weight_bytes,
            "free_bytes_per_device": fit.free_bytes,
            "sequences_per_device": fit.sequences_per_device,
            "sequences": fit.sequences,
            "longest_context": fit.longest_context,
        },
        "notes": list(plan.notes),
    }


def _group(group: Group) -> dict[str, Any]:
    layer, spec = group.layer, group.layer.spec
    return {
        "kind": layer.kind,
        "count": group.count,
        "query_heads": layer.num_heads,
        "kv_heads": None if spec is None else spec.kv_heads,
        "key_width": None if spec is None else spec.query_width,
        "value_width": None if spec is None else spec.value_width,
        "value_in_key": spec is not None and spec.value_offset is not None,
        "window": layer.window,
        "layout": None if group.layout is None else str(group.layout),
        "slots": group.slots,
        "bytes_per_token": group.bytes_per_token,
        "bytes_per_sequence": group.sequence_bytes,
        "state_bytes": layer.state_bytes,
    }
