# SPDX-License-Identifier: Apache-2.0
"""Caches in the signatures of exported programs (`jax.export`)."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax.export
import jax.numpy as jnp
import numpy as np

from jaxkv.cache.codecs import Raw
from jaxkv.cache.contiguous import Contiguous
from jaxkv.cache.evicting import Evicting, Kept
from jaxkv.cache.index import Fill, Index, Jobs, Plan
from jaxkv.cache.kivi import Kivi
from jaxkv.cache.layer_cache import LayerCache
from jaxkv.cache.model_cache import ModelCache
from jaxkv.cache.paged import Paged, Pages
from jaxkv.cache.policies import H2O, TOVA, Recent, SnapKV
from jaxkv.cache.quantised import Float8, Int4, Int8
from jaxkv.cache.records import Records
from jaxkv.cache.ring import Ring
from jaxkv.cache.spec import KVSpec

_CHOICES: dict[str, type] = {}


def register_export(*, nodes: tuple[type, ...] = (), choices: tuple[type, ...] = ()) -> None:
    """Lets `jax.export` write and read programs that take or return these classes.

    The library's own are registered on import. Call it for a layout or codec of your own.

    Args:
      nodes: Dataclasses that are pytrees (`jax.tree_util.register_dataclass`), such as the state
        of a layout.
      choices: Frozen dataclasses of numbers, names, dtypes and each other that stand in static
        fields, such as layouts and codecs.

    Raises:
      ValueError: If a class, or another one of its name, is registered already.
    """
    for cls in choices:
        if cls.__name__ in _CHOICES:
            raise ValueError(f"{cls.__name__} is registered already: {_CHOICES[cls.__name__]}.")
        _CHOICES[cls.__name__] = cls
    for cls in nodes:
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=f"jaxkv.{cls.__name__}",
            serialize_auxdata=_dump,
            deserialize_auxdata=_load,
            from_children=functools.partial(_rebuilt, cls),
        )


def _rebuilt(cls: type, aux_data: Any, children: Any) -> Any:
    """Builds a node of its static fields and its children, both in the order of the fields."""
    fields = {True: iter(aux_data), False: iter(children)}
    return cls(
        **{f.name: next(fields[f.metadata.get("static", False)]) for f in dataclasses.fields(cls)}
    )


def _dump(static: Any) -> bytes:
    return json.dumps(_plain(static)).encode()


def _load(data: bytes) -> Any:
    return _restored(json.loads(data))


def _plain(x: Any) -> Any:
    """Turns static fields into JSON; every tuple is a list there."""
    if x is None or isinstance(x, bool | int | float | str):
        return x
    if isinstance(x, tuple):
        return [_plain(item) for item in x]
    if isinstance(x, np.dtype):
        return {"dtype": x.name}
    if _CHOICES.get(type(x).__name__) is type(x):
        fields = {f.name: _plain(getattr(x, f.name)) for f in dataclasses.fields(x)}
        return {"choice": type(x).__name__, "fields": fields}
    raise ValueError(f"{x!r} cannot be exported: call register_export(choices=({type(x)},)).")


def _restored(x: Any) -> Any:
    if isinstance(x, list):
        return tuple(_restored(item) for item in x)
    if not isinstance(x, dict):
        return x
    if "dtype" in x:
        return jnp.dtype(x["dtype"])
    if x["choice"] not in _CHOICES:
        raise ValueError(f"unknown {x['choice']}: register_export it before loading.")
    return _CHOICES[x["choice"]](**{n: _restored(value) for n, value in x["fields"].items()})


register_export(
    nodes=(Index, Jobs, Fill, Plan, Records, LayerCache, ModelCache, Pages, Kept),
    choices=(KVSpec, Raw, Contiguous, Ring, Paged, Evicting, H2O, TOVA, SnapKV, Recent),
)
register_export(choices=(Int8, Int4, Float8, Kivi))
