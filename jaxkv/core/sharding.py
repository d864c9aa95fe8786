# SPDX-License-Identifier: Apache-2.0
"""Logical axis names, the table that maps them to mesh axes, and per-device execution."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

LOGICAL_AXES = (
    "batch",
    "length",
    "embed",
    "heads",
    "kv_heads",
    "head_dim",
    "latent",
    "mlp",
    "vocab",
    "slots",
)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Maps logical axes to mesh axes; an axis that is not named is not split.

    Args:
      table: Pairs `(logical axis, mesh axis)`. A mesh axis that a mesh does not have is ignored, so
        one table serves every mesh.

    Raises:
      ValueError: If a logical axis is unknown or named twice.
    """

    table: tuple[tuple[str, str], ...] = (
        ("batch", "data"),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("mlp", "tensor"),
        ("vocab", "tensor"),
    )

    def __post_init__(self) -> None:
        names = [name for name, _ in self.table]
        unknown = sorted(set(names) - set(LOGICAL_AXES))
        if unknown or len(set(names)) != len(names):
            raise ValueError(f"rules {self.table}: want each of {LOGICAL_AXES} at most once.")

    def mesh_axis(self, logical: str | None) -> str | None:
        """Looks up the mesh axis of a logical axis, `None` if it is not split."""
        return dict(self.table).get(logical) if logical is not None else None


DEFAULT_RULES = Rules()
_RULES: contextvars.ContextVar[Rules | None] = contextvars.ContextVar("jaxkv_rules", default=None)


@contextlib.contextmanager
def use_rules(rules: Rules) -> Iterator[None]:
    """Uses another rules table inside the block."""
    token = _RULES.set(rules)
    try:
        yield
    finally:
        _RULES.reset(token)


def current_rules() -> Rules:
    """Finds the rules table set by `use_rules`, or the default one."""
    return _RULES.get() or DEFAULT_RULES


def current_mesh() -> AbstractMesh | None:
    """Finds the mesh set by `jax.set_mesh`, or `None` where there is none to split over."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh is not None and free_axes(mesh) else None


def free_axes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Sizes the mesh axes that are ours to split: not those an outer `shard_map` has taken."""
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in kinds if kind != AxisType.Manual}


def axis_size(logical: str, mesh: Mesh | AbstractMesh | None = None) -> int:
    """Counts the devices that a logical axis is split over."""
    mesh = mesh or current_mesh()
    name = current_rules().mesh_axis(logical)
    return 1 if mesh is None or name is None else free_axes(mesh).get(name, 1)


def spec_for(
    axes: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh | None = None,
    rules: Rules | None = None,
) -> PartitionSpec:
    """Resolves logical axes to a `PartitionSpec`.

    An axis whose size the mesh axis does not divide is not split, and a mesh axis is used once.

    >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "tensor"))
    >>> spec_for(("batch", None, "kv_heads"), (8, 5, 2), mesh)
    P('data', None, None)
    """
    mesh = mesh or current_mesh()
    rules = rules or current_rules()
    if len(axes) != len(shape):
        raise ValueError(f"axes {tuple(axes)} do not fit shape {tuple(shape)}: one name per axis.")
    sizes = free_axes(mesh) if mesh is not None else {}
    out: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        name = rules.mesh_axis(axis)
        devices = sizes.get(name, 0) if name is not None else 0
        out.append(name if devices and name not in out and size % devices == 0 else None)
    return PartitionSpec(*out)


def named(
    mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int], rules: Rules | None = None
) -> NamedSharding:
    """Builds the `NamedSharding` of an array from its logical axes."""
    return NamedSharding(mesh, spec_for(axes, shape, mesh, rules))


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Places an activation by its logical axes; without a mesh, returns it as it is."""
    mesh = current_mesh()
    if mesh is None:
        return x
    spec = spec_for(axes, x.shape, mesh)
    if AxisType.Explicit in mesh.axis_types:
        x = jax.sharding.reshard(x, _only(AxisType.Explicit, spec, mesh))
    if AxisType.Auto in mesh.axis_types:
        x = jax.lax.with_sharding_constraint(x, _only(AxisType.Auto, spec, mesh))
    return x


def out_sharding(axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec | None:
    """Names the placement of a product's result, which Explicit meshes ask for."""
    mesh = current_mesh()
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return None
    return _only(AxisType.Explicit, spec_for(axes, shape, mesh), mesh)


AxisTree = Any  # a pytree of tuples of logical names, one tuple per array


def local(fn: Callable[..., Any], in_axes: Sequence[AxisTree], out_axes: AxisTree) -> Callable:
    """Runs `fn` once per device on that device's rows and heads.

    Args:
      fn: Works on arrays (or pytrees of arrays) and needs nothing of other rows or heads.
      in_axes: One entry per argument: a tuple of logical names per array, as a tree prefix.
      out_axes: The same for the result.

    Returns:
      A function of the same arguments. Without a mesh it is `fn`. On a mesh it is `fn` under
      `shard_map`: no collectives, the same on Auto and Explicit meshes.
    """

    def run(*args: Any) -> Any:
        mesh = current_mesh()
        if mesh is None:
            return fn(*args)
        explicit = AxisType.Explicit in mesh.axis_types
        # An Explicit mesh of one device still puts its axes on the arrays that `fn` would see.
        if math.prod(free_axes(mesh).values()) == 1 and not explicit:
            return fn(*args)
        in_specs = tuple(_specs(a, x, mesh) for a, x in zip(in_axes, args, strict=True))
        # Inside the trace the shapes are local ones, so logical axes are resolved out here, on
        # bare shapes and no mesh: `fn` need not be legal on arrays that an Explicit one splits.
        bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            results = jax.eval_shape(fn, *bare)
        out_specs = _specs(out_axes, results, mesh)
        _check_split(out_axes, results, out_specs, in_specs)
        if explicit:
            placed = jax.tree.map(lambda spec: _only(AxisType.Explicit, spec, mesh), in_specs)
            args = jax.tree.map(jax.sharding.reshard, args, placed)
        mapped = jax.shard_map(
            fn,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(free_axes(mesh)),
            check_vma=False,
        )
        return mapped(*args)

    return run


def _only(kind: AxisType, spec: PartitionSpec, mesh: AbstractMesh) -> PartitionSpec:
    """Keeps the mesh axes of one kind: on a mixed mesh each kind is placed by its own call."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return PartitionSpec(*(name if kinds.get(name) == kind else None for name in spec))


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(n is None or isinstance(n, str) for n in node)


def _check_split(axes: AxisTree, results: Any, specs: Any, given: Any) -> None:
    """Refuses a result that every device would have its own of, and of which one would be taken.

    So it is where arguments are split over a mesh axis that the result names and cannot take.
    """
    used = {name for spec in jax.tree.leaves(given) for name in spec if name is not None}

    def one(names: tuple, subtree: Any, spec_tree: Any) -> None:
        for x, spec in zip(jax.tree.leaves(subtree), jax.tree.leaves(spec_tree), strict=True):
            wanted = {current_rules().mesh_axis(n) for n in names[: x.ndim] if n is not None}
            if lost := wanted & used - set(spec):
                raise ValueError(
                    f"a result {x.dtype}{x.shape} of axes {names} cannot be split over mesh axes "
                    f"{sorted(map(str, lost))}, over which the arguments are."
                )

    jax.tree.map(one, axes, results, specs, is_leaf=_is_axes)


def _specs(axes: AxisTree, arrays: Any, mesh: AbstractMesh) -> Any:
    """Gives every array of a tree its spec; one tuple of names may stand for a subtree.

    Names are those of an array's first axes; the rest is not split.
    """

    def one(names: tuple, subtree: Any) -> Any:
        def fitted(x: Any) -> PartitionSpec:
            full = (*names, *(None,) * x.ndim)[: x.ndim]
            return spec_for(full, x.shape, mesh)

        return jax.tree.map(fitted, subtree)

    return jax.tree.map(one, axes, arrays, is_leaf=_is_axes)
