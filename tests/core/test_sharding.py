# SPDX-License-Identifier: Apache-2.0
"""Logical axes, the rules table, and running per device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv.core.sharding import (
    LOGICAL_AXES,
    Rules,
    axis_size,
    constrain,
    current_mesh,
    current_rules,
    local,
    named,
    out_sharding,
    spec_for,
    use_rules,
)

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {
    "auto": (AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
    "auto-explicit": (AUTO, EXPLICIT),
    "explicit-auto": (EXPLICIT, AUTO),
}
PLANNED = AbstractMesh((2, 4), ("data", "tensor"))
ROWS = ("batch", None, "heads")


def mesh_of(kinds=(AUTO, AUTO), shape=(2, 4)):
    return jax.make_mesh(shape, ("data", "tensor"), axis_types=kinds)


class TestRules:
    @pytest.mark.parametrize(
        "table", [(("rows", "data"),), (("batch", "data"), ("batch", "tensor"))]
    )
    def test_unknown_and_repeated_axes_raise(self, table):
        with pytest.raises(ValueError, match="want each of .*'batch', 'length'.* at most once"):
            Rules(table)

    def test_default_splits_rows_and_heads(self):
        split = {name: Rules().mesh_axis(name) for name in LOGICAL_AXES}
        assert split == dict.fromkeys(LOGICAL_AXES) | {
            "batch": "data",
            "heads": "tensor",
            "kv_heads": "tensor",
            "mlp": "tensor",
            "vocab": "tensor",
        }
        assert Rules().mesh_axis(None) is None

    def test_use_rules_nests_and_is_undone_by_an_error(self):
        one, two = Rules((("mlp", "data"),)), Rules(())
        with pytest.raises(KeyError), use_rules(one):
            with use_rules(two):
                assert current_rules() is two
            assert current_rules() is one
            raise KeyError
        assert current_rules() == Rules()

    def test_rules_are_values(self):
        assert Rules() == Rules() and hash(Rules()) == hash(Rules())
        with pytest.raises(dataclasses.FrozenInstanceError):
            Rules().table = ()


class TestSpecFor:
    @pytest.mark.parametrize(
        ("axes", "shape", "want"),
        [
            (
                ("batch", "length", "heads", "head_dim"),
                (4, 3, 8, 5),
                P("data", None, "tensor", None),
            ),
            (("batch", "kv_heads"), (4, 2), P("data", None)),  # 2 heads, 4 devices
            (("batch", "kv_heads"), (3, 4), P(None, "tensor")),  # 3 rows, 2 devices
            (("heads", "mlp"), (8, 8), P("tensor", None)),  # a mesh axis is used once
            (("heads", "mlp"), (2, 8), P(None, "tensor")),  # and is free if it was not used
            ((None, "slots"), (4, 4), P(None, None)),
            (("batch",), (0,), P("data")),
            ((), (), P()),
        ],
    )
    def test_names_resolve(self, axes, shape, want):
        assert spec_for(axes, shape, PLANNED) == want

    def test_a_mesh_without_the_axis_and_no_mesh_split_nothing(self):
        rows = AbstractMesh((8,), ("data",))
        assert spec_for(("batch", "heads"), (8, 8), rows) == P("data", None)
        assert spec_for(("batch", "heads"), (8, 8)) == P(None, None)

    def test_given_rules_come_before_the_current_ones(self):
        fsdp = Rules((("embed", "data"),))
        with use_rules(Rules((("embed", "tensor"),))):
            assert spec_for(("embed", "mlp"), (8, 8), PLANNED, fsdp) == P("data", None)
            assert spec_for(("embed", "mlp"), (8, 8), PLANNED) == P("tensor", None)

    def test_one_name_per_axis(self):
        with pytest.raises(ValueError, match=r"axes \('batch',\) do not fit shape \(2, 3\)"):
            spec_for(("batch",), (2, 3), PLANNED)

    def test_every_part_has_the_same_size(self):
        # What spec_for answers must be a placement that JAX accepts, for any sizes.
        mesh = mesh_of()
        for batch in range(1, 5):
            for heads in (1, 2, 3, 4, 6, 8):
                shape = (batch, 5, heads)
                part = named(mesh, ROWS, shape).shard_shape(shape)
                assert part[0] == (batch // 2 if batch % 2 == 0 else batch)
                assert part[2] == (heads // 4 if heads % 4 == 0 else heads)

    def test_named_belongs_to_its_mesh(self):
        mesh = mesh_of()
        assert named(mesh, ROWS, (4, 5, 8)) == NamedSharding(mesh, P("data", None, "tensor"))

    def test_axis_size_counts_devices(self):
        assert axis_size("heads") == 1
        assert axis_size("heads", PLANNED) == 4
        assert axis_size("latent", PLANNED) == 1
        assert axis_size("heads", AbstractMesh((8,), ("data",))) == 1
        with jax.set_mesh(mesh_of()):
            assert axis_size("batch") == 2
            with use_rules(Rules(())):
                assert axis_size("batch") == 1


class TestConstrain:
    @pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
    def test_places_on_every_kind_of_mesh(self, kinds):
        x = jnp.arange(4 * 3 * 8.0).reshape(4, 3, 8)
        mesh = mesh_of(kinds)
        with jax.set_mesh(mesh):
            y = jax.jit(lambda x: constrain(x * 2, ROWS))(x)
            assert y.sharding.shard_shape(y.shape) == (2, 3, 2)
        np.testing.assert_array_equal(jax.device_get(y), 2 * x)

    def test_without_a_mesh_is_nothing(self):
        x = jnp.ones((4, 3, 8))
        assert constrain(x, ROWS) is x

    def test_out_sharding_names_explicit_axes_only(self):
        assert out_sharding(ROWS, (4, 3, 8)) is None
        wants = dict(
            zip(
                KINDS,
                (None, P("data", None, "tensor"), P(None, None, "tensor"), P("data", None, None)),
                strict=True,
            )
        )
        for name, kinds in KINDS.items():
            with jax.set_mesh(mesh_of(kinds)):
                assert out_sharding(ROWS, (4, 3, 8)) == wants[name]

    def test_products_take_out_sharding(self):
        x, w = jnp.ones((4, 3, 16)), jnp.ones((16, 8))
        with jax.set_mesh(mesh_of((EXPLICIT, EXPLICIT))):

            def product(x, w):
                return jnp.einsum("btd,dn->btn", x, w, out_sharding=out_sharding(ROWS, (4, 3, 8)))

            placed = jax.device_put(x, P("data")), jax.device_put(w, P(None, "tensor"))
            y = jax.jit(product)(*placed)
            assert jax.typeof(y).sharding.spec == P("data", None, "tensor")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    """A pytree of two arrays, one of which may be missing."""

    a: jax.Array
    b: jax.Array | None


class TestLocal:
    def test_without_a_mesh_is_the_function(self):
        marker = object()
        assert local(lambda x: x, (ROWS,), ROWS)(marker) is marker

    @pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
    def test_each_device_sees_its_own_rows_and_heads(self, kinds):
        shapes = []

        def fn(x, pair):
            shapes.append((x.shape, pair.a.shape))
            scale = 1 + pair.a[:, None, None]
            return Pair(x * scale, None), jnp.sum(x, axis=(1,))

        run = local(fn, (ROWS, Pair(("batch",), ROWS)), (Pair(ROWS, None), ("batch", "heads")))
        x = jnp.arange(4 * 3 * 8.0).reshape(4, 3, 8)
        pair = Pair(jnp.arange(4.0), None)
        want, total = fn(x, pair)
        shapes.clear()
        with jax.set_mesh(mesh_of(kinds)):
            got, got_total = jax.jit(run)(x, pair)
        assert got.b is None
        np.testing.assert_array_equal(jax.device_get(got.a), want.a)
        np.testing.assert_array_equal(jax.device_get(got_total), total)
        assert shapes[-1] == ((2, 3, 2), (2,))
        assert got.a.sharding.shard_shape(got.a.shape) == (2, 3, 2)

    @pytest.mark.parametrize("kinds", [KINDS["auto"], KINDS["explicit"]], ids=["auto", "explicit"])
    def test_gradients_of_shared_arrays_are_summed_once(self, kinds):
        x, w = jnp.arange(4 * 3 * 8.0).reshape(4, 3, 8), jnp.arange(3.0) + 1

        def loss(w, x):
            run = local(lambda w, x: x * w[None, :, None], ((None,), ROWS), ROWS)
            return jnp.sum(jnp.square(run(w, x)))

        want = jax.grad(loss)(w, x)
        with jax.set_mesh(mesh_of(kinds)):
            got = jax.jit(jax.grad(loss))(w, x)
        np.testing.assert_allclose(jax.device_get(got), want, rtol=1e-6)

    def test_a_result_that_each_device_has_its_own_of_is_refused(self):
        run = local(lambda x: jnp.sum(x, axis=2, keepdims=True), (ROWS,), ROWS)
        x = jnp.ones((4, 3, 8))
        assert run(x).shape == (4, 3, 1)
        with jax.set_mesh(mesh_of()), pytest.raises(ValueError, match="cannot be split over mesh"):
            run(x)

    def test_one_tuple_of_names_stands_for_a_whole_tree(self):
        def fn(pair):
            return Pair(pair.a + 1, pair.b * 2)

        run = local(fn, (("batch",),), ("batch",))
        pair = Pair(jnp.arange(4.0), jnp.arange(4 * 3 * 2).reshape(4, 3, 2))
        with jax.set_mesh(mesh_of()):
            got = jax.jit(run)(pair)
        np.testing.assert_array_equal(jax.device_get(got.a), pair.a + 1)
        np.testing.assert_array_equal(jax.device_get(got.b), pair.b * 2)
        assert got.b.sharding.shard_shape(got.b.shape) == (2, 3, 2)

    def test_a_mesh_of_one_device_needs_no_shard_map(self):
        run = local(lambda x: x * 2, (ROWS,), ROWS)
        with jax.set_mesh(mesh_of(shape=(1, 1))):
            assert "shard_map" not in str(jax.make_jaxpr(run)(jnp.ones((4, 3, 8))))
        with jax.set_mesh(mesh_of()):
            assert "shard_map" in str(jax.make_jaxpr(run)(jnp.ones((4, 3, 8))))

    @pytest.mark.parametrize("names", [{"data"}, {"data", "tensor"}], ids=["rows", "all"])
    def test_axes_of_an_outer_shard_map_are_left_alone(self, names):
        free = []

        def inner(x):
            mesh = current_mesh()
            free.append(mesh is not None and axis_size("heads"))
            return local(lambda x: x * 2, (ROWS,), ROWS)(x)

        x = jnp.arange(4 * 3 * 8.0).reshape(4, 3, 8)
        outer = jax.shard_map(
            inner, in_specs=P("data"), out_specs=P("data"), axis_names=names, check_vma=False
        )
        with jax.set_mesh(mesh_of()):
            np.testing.assert_array_equal(jax.device_get(jax.jit(outer)(x)), 2 * x)
        assert free[-1] == (4 if names == {"data"} else False)

    def test_no_communication(self):
        run = local(lambda x: jnp.cumsum(x, axis=1), (ROWS,), ROWS)
        mesh = mesh_of()
        x = jax.ShapeDtypeStruct((4, 3, 8), jnp.float32, sharding=named(mesh, ROWS, (4, 3, 8)))
        with jax.set_mesh(mesh):
            text = jax.jit(run).lower(x).compile().as_text()
        for word in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
            assert word not in text
