# SPDX-License-Identifier: Apache-2.0
"""Loading checkpoints: every tensor is used, every parameter set, and mistakes are named."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from safetensors.numpy import save_file

from jaxkv.core.numerics import Numerics
from jaxkv.models.configs import read_config
from jaxkv.models.families import FAMILIES, from_hf, llama
from jaxkv.models.families.loading import fill
from tests.support import hf

GQA, TIED, YARN = "llama_gqa", "llama_mha_bias", "deepseek_v3_yarn"
Tensors = dict[str, np.ndarray]


def parameters(model: nnx.Module) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in flat}


def assert_same_model(one: nnx.Module, other: nnx.Module) -> None:
    """Checks that two models have the same structure, settings and parameters."""
    assert nnx.split(one)[0] == nnx.split(other)[0]
    left, right = parameters(one), parameters(other)
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


@pytest.mark.parametrize("name", hf.NAMES)
def test_parameters_are_as_many_as_the_planner_counts(name: str) -> None:
    total = sum(value.size for value in parameters(hf.model(name)).values())
    assert total == read_config(hf.config(name)).parameters


@pytest.mark.parametrize("name", hf.NAMES)
def test_imp_06_every_missing_tensor_is_named(name: str) -> None:
    for left_out in hf.weights(name):
        tensors = {key: tensor for key, tensor in hf.weights(name).items() if key != left_out}
        with pytest.raises(ValueError, match=f"lacks the tensors {left_out}\\."):
            from_hf(hf.config(name), tensors)


@pytest.mark.parametrize("extra", ["model.layers.2.mlp.up_proj.weight", "lm_head.bias"])
def test_imp_06_tensors_left_over_are_named(extra: str) -> None:
    tensors = {**hf.weights(GQA), extra: np.zeros(3, np.float32), "another": np.zeros(1)}
    with pytest.raises(ValueError, match=f"no place for the tensors another, {extra}\\."):
        from_hf(hf.config(GQA), tensors)


def test_imp_06_biases_that_the_config_denies_are_left_over() -> None:
    config = {**hf.config(TIED), "attention_bias": False}
    with pytest.raises(ValueError, match="no place for .*k_proj.bias, .*v_proj.bias"):
        from_hf(config, hf.weights(TIED))


def test_imp_06_parameters_that_no_tensor_sets_are_named() -> None:
    recipe = llama.recipe(hf.config(GQA), read_config(hf.config(GQA)))
    forgotten, source = "blocks.1.attention.value.kernel", "model.layers.1.self_attn.v_proj.weight"
    weights = [weight for weight in recipe.weights if weight.target != forgotten]
    tensors = {key: tensor for key, tensor in hf.weights(GQA).items() if key != source}
    with pytest.raises(ValueError, match=f"no tensor sets the parameters {forgotten}\\."):
        fill(dataclasses.replace(recipe, weights=weights), tensors, Numerics())
    strange = dataclasses.replace(recipe.weights[0], target="blocks.7.norm")
    invented = dataclasses.replace(recipe, weights=[*recipe.weights, strange])
    with pytest.raises(ValueError, match="the model has no parameters blocks.7.norm\\."):
        fill(invented, hf.weights(GQA), Numerics())


def test_a_tensor_of_another_shape_is_named_even_if_the_size_fits() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = {**hf.weights(GQA), name: hf.weights(GQA)[name].T}
    with pytest.raises(ValueError, match=r"q_proj.weight \(48, 96\): the config wants \(96, 48\)"):
        from_hf(hf.config(GQA), tensors)


def test_gqa_06_a_checkpoint_of_other_kv_heads_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"k_proj.weight \(32, 48\): the config wants \(96, 48\)"):
        from_hf({**hf.config(GQA), "num_key_value_heads": 6}, hf.weights(GQA))


def test_a_tied_head_may_repeat_the_embedding_and_nothing_else() -> None:
    tensors = {**hf.weights(TIED), "lm_head.weight": hf.weights(TIED)["model.embed_tokens.weight"]}
    assert_same_model(from_hf(hf.config(TIED), tensors), hf.model(TIED))
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        from_hf(hf.config(TIED), tensors)


def test_stored_rotary_tables_are_passed_over() -> None:
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert_same_model(from_hf(hf.config(GQA), {**hf.weights(GQA), **table}), hf.model(GQA))


@pytest.mark.parametrize("name", [GQA, TIED, YARN])
def test_imp_09_both_spellings_of_rope_settings_give_equal_modules(name: str) -> None:
    config = copy.deepcopy(hf.config(name))
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    assert_same_model(from_hf(config, hf.weights(name)), hf.model(name))
    config["rope_scaling"]["type"] = "spiral"
    with pytest.raises(ValueError, match="unknown rope type 'spiral'"):
        from_hf(config, hf.weights(name))


def test_a_model_type_without_a_loader_names_those_that_have_one() -> None:
    config = {"model_type": "gpt2", "vocab_size": 96, "n_positions": 8, "n_embd": 8, "n_head": 2}
    with pytest.raises(ValueError, match="'gpt2'.*deepseek_v3, llama"):
        from_hf({**config, "n_layer": 1}, {})
    assert sorted(FAMILIES) == ["deepseek_v3", "llama"]


def changed(**changes: Any) -> Callable[[str], dict[str, Any]]:
    return lambda name: {**hf.config(name), **changes}


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (YARN, changed(first_k_dense_replace=1), "layers 1 to 1 have experts"),
        ("deepseek_v3_noq", changed(attention_bias=True), "attention_bias without q_lora_rank"),
        (GQA, changed(hidden_act="swish2"), "activation 'swish2'"),
        (GQA, changed(surprise=1), "unknown field 'surprise'"),
    ],
)
def test_configs_that_a_decoder_cannot_follow_are_refused(
    name: str, config: Callable[[str], dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf(config(name), hf.weights(name))


def test_a_checkpoint_of_several_files_loads_whole(tmp_path: Path) -> None:
    parts: list[Tensors] = [{}, {}]
    for i, (key, tensor) in enumerate(hf.weights(GQA).items()):
        parts[i % 2][key] = tensor
    for i, part in enumerate(parts, 1):
        save_file(part, tmp_path / f"model-0000{i}-of-00002.safetensors")
    assert_same_model(from_hf(hf.config(GQA), tmp_path), hf.model(GQA))
    save_file({"lm_head.weight": np.ones(1)}, tmp_path / "model-extra.safetensors")
    with pytest.raises(ValueError, match="repeats the tensors lm_head.weight"):
        from_hf(hf.config(GQA), tmp_path)


def test_files_that_are_missing_or_something_else_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no weights at .*want a safetensors file"):
        from_hf(hf.config(GQA), tmp_path)
    with pytest.raises(ValueError, match="no weights at .*absent.safetensors"):
        from_hf(hf.config(GQA), tmp_path / "absent.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"a text, not tensors")
    with pytest.raises(ValueError, match="model.safetensors' is no safetensors file"):
        from_hf(hf.config(GQA), tmp_path)


def test_files_without_the_extra_give_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r'pip install "jaxkv\[hf\]"'):
        from_hf(hf.FOLDER / GQA, hf.FOLDER / GQA)
    assert_same_model(from_hf(hf.config(GQA), hf.weights(GQA)), hf.model(GQA))


def test_parameters_take_the_param_dtype_from_tensors_of_any(tmp_path: Path) -> None:
    tensors = {key: tensor.astype(jnp.bfloat16) for key, tensor in hf.weights(YARN).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    for source in (tensors, tmp_path):
        half = parameters(from_hf(hf.config(YARN), source, numerics=Numerics(None, jnp.bfloat16)))
        single = parameters(from_hf(hf.config(YARN), source))
        assert {value.dtype for value in half.values()} == {jnp.dtype(jnp.bfloat16)}
        assert {value.dtype for value in single.values()} == {jnp.dtype(jnp.float32)}
        kernel = tensors["lm_head.weight"].T
        np.testing.assert_array_equal(half["head.kernel"], kernel)
        np.testing.assert_array_equal(single["head.kernel"], kernel.astype(np.float32))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", [GQA, YARN])
def test_on_a_mesh_parameters_are_placed_by_their_axes(name: str, kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (kind,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        model = from_hf(hf.config(name), hf.weights(name))
        out = parameters(model)["blocks.0.attention.out.kernel"]
        assert len(out.sharding.device_set) == 4
        assert out.addressable_shards[0].data.shape[0] == out.shape[0] // 2
        logits = hf.prompt_logits(model, hf.oracle(name)["tokens"])
    assert np.abs(logits - hf.oracle(name)["logits_float64"]).max() <= hf.tolerance(name)
