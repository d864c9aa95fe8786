# SPDX-License-Identifier: Apache-2.0
"""Configs as Hugging Face writes them, and what is read from them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from jaxkv.cache.spec import KVSpec
from jaxkv.core.rotary import Rotary
from jaxkv.core.rotary_scaling import DynamicNTK, Linear, Llama3, YaRN
from jaxkv.models.config_fields import IRRELEVANT, ONLY, names
from jaxkv.models.configs import FAMILIES, WRAPPERS, read_config
from jaxkv.models.geometry import LayerSpec, ModelGeometry
from jaxkv.models.presets import load_geometry, preset, preset_names

# Written by Hugging Face's own classes, with parameters counted on the models they build.
HF = json.loads((Path(__file__).parent / "hf_configs.json").read_text("utf-8"))["cases"]
HF_FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
GEMMA3_LAYER_TYPES = ("sliding_attention", "full_attention")

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Spells rotary settings as configs did before `rope_parameters`."""
    config = copy.deepcopy(config)
    new = config.pop("rope_parameters", None)
    if new is None:
        return config
    if "full_attention" in new:
        config["rope_local_base_freq"] = new["sliding_attention"].pop("rope_theta")
        new = new["full_attention"]
    config["rope_theta"] = new.pop("rope_theta")
    kind = new.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **new}
    return config


@pytest.mark.parametrize("case", HF)
def test_parameters_equal_the_models_that_hugging_face_builds(case: str) -> None:
    assert read_config(HF[case]["config"]).parameters == HF[case]["parameters"]


def test_fixture_models_are_read_as_their_page_describes_them() -> None:
    page = (HF_FIXTURES / "README.md").read_text("utf-8")
    found = {path.name: read_config(path) for path in HF_FIXTURES.iterdir() if path.is_dir()}
    assert len(found) >= 4
    for name, geometry in found.items():
        assert geometry.name == name
        assert f"{geometry.parameters:,} |" in page
    assert found["llama_gqa"].layers[0].spec == KVSpec(2, 16, 16)
    assert found["deepseek_v3_yarn"].layers[0].expanded == KVSpec(4, 36, 14)


@pytest.mark.parametrize("case", HF)
def test_imp_09_old_and_new_rope_spelling_give_equal_geometry(case: str) -> None:
    config = HF[case]["config"]
    assert read_config(old_spelling(config)) == read_config(config)


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_type": "linear", "factor": 8.0}, Linear(8.0)),
        ({"rope_type": "dynamic", "factor": 2.0}, DynamicNTK(2.0, 512)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            Llama3(8.0, 1.0, 4.0, 64),
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 64,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.7,
                "mscale_all_dim": 0.6,
                "attention_factor": 1.5,
                "truncate": False,
            },
            YaRN(40.0, 64, 16.0, 2.0, 0.7, 0.6, 1.5, False),
        ),
    ],
)
def test_rope_types_are_read_in_both_spellings(rope: dict[str, Any], scaling: Any) -> None:
    new = LLAMA | {"rope_parameters": rope | {"rope_theta": 5e5}}
    old = LLAMA | {"rope_scaling": rope, "rope_theta": 5e5}
    for config in (new, old, old_spelling(new)):
        assert read_config(config).layers[0].rotary == Rotary(theta=5e5, scaling=scaling)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "unknown rope type 'longrope'",
        ),
        ({"rope_parameters": {"rope_type": "mrope"}}, "unknown rope type 'mrope'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}},
            r"unknown keys \['beta'\]",
        ),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs 'factor'"),
        ({"rope_scaling": "linear"}, "want a dictionary"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 10000.0"),
        ({"rope_scaling": {"type": "default"}, "rope_parameters": {}}, "both rope_scaling and"),
    ],
)
def test_imp_09_bad_rope_settings_are_named(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        read_config(LLAMA | change)


def test_imp_09_gpt2_names_and_long_names_give_equal_geometry() -> None:
    short = HF["gpt2-0"]["config"]
    long = {FAMILIES["gpt2"].spellings.get(name, name): value for name, value in short.items()}
    assert "n_embd" in short and "n_embd" not in long
    assert read_config(long) == read_config(short)
    with pytest.raises(ValueError, match="n_head = 5 and another spelling of num_attention_heads"):
        read_config({**long, "n_head": 5})


def test_alibi_is_read_into_the_layers() -> None:
    bloom = read_config(HF["bloom-0"]["config"])
    # 2 x 48 numbers of a token and layer; 4 heads by section 3 of the paper.
    assert bloom.layers[0].spec == KVSpec(4, 12, 12) and len(bloom.layers) == 3
    assert bloom.layers[0].alibi == (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8)
    mpt = HF["mpt-0"]["config"]
    # MPT takes the odd ones of 8 heads, then the even ones, and stops after 6.
    want = [2.0**-n for n in (2, 4, 6, 8, 1, 3)]
    assert read_config(mpt).layers[0].alibi == tuple(want)
    half = mpt["attn_config"] | {"alibi_bias_max": 4}
    assert read_config(mpt | {"attn_config": half}).layers[0].alibi == pytest.approx(
        [x**0.5 for x in want]
    )
    for name in ("alibi", "qk_ln", "attn_type"):
        other = mpt["attn_config"] | {name: not mpt["attn_config"][name]}
        with pytest.raises(ValueError, match=f"mpt attn_config config: {name} = "):
            read_config(mpt | {"attn_config": other})


@pytest.mark.parametrize(
    ("config", "parameters", "bytes_per_token"),
    [
        # The figures of the models' pages: 559 million, 176 billion, 6.7 billion.
        (
            {"model_type": "bloom", "vocab_size": 250_880, "hidden_size": 1024}
            | {"n_layer": 24, "n_head": 16, "seq_length": 2048},
            559_214_592,
            24 * 2 * 1024 * 2,
        ),
        (
            {"model_type": "bloom", "vocab_size": 250_880, "n_embed": 14_336}
            | {"n_layer": 70, "num_attention_heads": 112},
            176_247_271_424,
            70 * 2 * 14_336 * 2,
        ),
        (
            {"model_type": "mpt", "vocab_size": 50_432, "d_model": 4096, "n_layers": 32}
            | {"n_heads": 32, "max_seq_len": 2048, "attn_config": {"alibi": True}},
            6_649_286_656,
            32 * 2 * 4096 * 2,
        ),
    ],
)
def test_models_with_alibi_have_their_published_sizes(
    config: dict[str, Any], parameters: int, bytes_per_token: int
) -> None:
    geometry = read_config(config)
    assert geometry.parameters == parameters
    elements = sum(layer.spec.elements_per_token for layer in geometry.layers if layer.spec)
    assert 2 * elements == bytes_per_token and geometry.max_context == 2048


def test_key_value_heads_and_head_width() -> None:
    grouped = read_config(LLAMA)
    assert grouped.layers == (LayerSpec("full", 6, KVSpec(2, 8, 8), rotary=Rotary()),) * 2
    without = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert read_config(without).layers[0].spec == KVSpec(6, 8, 8)
    assert read_config(LLAMA | {"head_dim": None}) == grouped
    assert read_config(LLAMA | {"head_dim": 24}).layers[0].spec == KVSpec(2, 24, 24)
    with pytest.raises(ValueError, match="6 heads do not divide hidden_size 50"):
        read_config(LLAMA | {"hidden_size": 50})


def full_layers(geometry: ModelGeometry) -> list[int]:
    return [i for i, layer in enumerate(geometry.layers) if layer.kind == "full"]


def gemma3(**change: Any) -> dict[str, Any]:
    return preset("gemma3-1b")["config"] | change


def test_gemma3n_reads_the_last_layer_of_each_kind() -> None:
    # 35 layers, of which every fifth is full; the last 15 read layers 18 and 19.
    big, small = load_geometry("gemma3n-e4b"), load_geometry("gemma3n-e2b")
    kept = big.layers[:20]
    assert [i for i, layer in enumerate(kept) if layer.kind == "full"] == [4, 9, 14, 19]
    assert {layer.spec for layer in kept} == {KVSpec(2, 256, 256)}
    assert {layer.window for layer in kept} == {512, None}
    assert [layer.source for layer in big.layers[20:]] == [18, 18, 18, 18, 19] * 3
    assert small.layers[:20] == kept and small.layers[20:] == big.layers[20:30]
    assert big.layers[20].rotary == big.layers[18].rotary != big.layers[19].rotary
    config = preset("gemma3n-e4b")["config"]
    wrapped = {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}}
    assert read_config(wrapped | {"audio_config": {}}, name="gemma3n-e4b") == big
    assert read_config(config | {"num_kv_shared_layers": 0}).layers[:20] == kept
    for shared in (31, 35, 36):
        with pytest.raises(ValueError, match=f"num_kv_shared_layers = {shared}, but no layer"):
            read_config(config | {"num_kv_shared_layers": shared})


def test_imp_10_gemma3_pattern_and_explicit_layer_types() -> None:
    by_pattern = read_config(gemma3())
    assert len(by_pattern.layers) == 26 and full_layers(by_pattern) == [5, 11, 17, 23]
    assert full_layers(read_config(gemma3(sliding_window_pattern=None))) == [5, 11, 17, 23]
    assert full_layers(read_config(gemma3(sliding_window_pattern=13))) == [12, 25]
    odd = [GEMMA3_LAYER_TYPES[i in (0, 7)] for i in range(26)]
    explicit = read_config(gemma3(layer_types=odd, sliding_window_pattern=6))
    assert full_layers(explicit) == [0, 7]
    assert {layer.rotary.theta for layer in explicit.layers if layer.window} == {1e4}
    assert explicit.layers[7].rotary == Rotary(theta=1e6)


@pytest.mark.parametrize("case", [c for c in HF if "layer_types" in HF[c]["config"]])
def test_imp_10_default_patterns_equal_the_ones_hugging_face_writes(case: str) -> None:
    config = dict(HF[case]["config"])
    explicit = read_config(config)
    del config["layer_types"]
    assert read_config(config) == explicit


def test_qwen_windows_need_their_switch() -> None:
    config = HF["qwen2-0"]["config"] | {"layer_types": None}
    assert full_layers(read_config(config)) == [0]
    assert full_layers(read_config(config | {"max_window_layers": 2})) == [0, 1]
    assert full_layers(read_config(config | {"use_sliding_window": False})) == [0, 1, 2]
    off = HF["qwen2-0"]["config"] | {"use_sliding_window": False}
    with pytest.raises(ValueError, match="layer 1 slides, but .* off by use_sliding_window"):
        read_config(off)


def test_mistral_slides_everywhere_or_nowhere() -> None:
    config = HF["mistral-0"]["config"]
    assert [layer.window for layer in read_config(config).layers] == [4096] * 3
    assert full_layers(read_config(config | {"sliding_window": None})) == [0, 1, 2]


@pytest.mark.parametrize(
    ("types", "word"),
    [
        (["full_attention"], "1 layer_types for 3 layers"),
        (["full_attention", "linear_attention", "full_attention"], r"\['linear_attention'\]"),
    ],
)
def test_bad_layer_types_are_named(types: list[str], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        read_config(HF["gemma2-0"]["config"] | {"layer_types": types})


def test_multimodal_wrapper_reads_its_text_part() -> None:
    text = {k: v for k, v in preset("gemma3-4b")["config"].items() if k != "vocab_size"}
    sparse = {k: text[k] for k in text if not k.startswith("num_") or k == "num_hidden_layers"}
    for part in (text, sparse):
        wrapped = {"model_type": "gemma3", "text_config": part, "vision_config": {"depth": 27}}
        found = read_config(wrapped | {"mm_tokens_per_image": 256}, name="gemma3-4b")
        assert found == load_geometry("gemma3-4b")
    with pytest.raises(ValueError, match="'text_config' is missing"):
        read_config({"model_type": "gemma3"})
    with pytest.raises(ValueError, match="gemma3 config: unknown field 'audio_config'"):
        read_config(wrapped | {"audio_config": {}})


@pytest.mark.parametrize("case", HF)
def test_unknown_field_is_named(case: str) -> None:
    with pytest.raises(ValueError, match="unknown field 'num_global_key_value_heads'"):
        read_config(HF[case]["config"] | {"num_global_key_value_heads": 2})


@pytest.mark.parametrize("field", sorted(IRRELEVANT - {"model_type", "_name_or_path"}))
def test_irrelevant_fields_change_nothing(field: str) -> None:
    assert read_config(LLAMA | {field: "anything"}) == read_config(LLAMA)


@pytest.mark.parametrize("field", sorted(ONLY))
def test_fields_with_one_supported_value(field: str) -> None:
    for value in ONLY[field]:
        assert read_config(LLAMA | {field: value}) == read_config(LLAMA)
    with pytest.raises(ValueError, match=f"{field} = True is not supported"):
        read_config(LLAMA | {field: True})


def mutated(value: Any, field: str, config: dict[str, Any]) -> Any:
    if field == "layer_types":
        return [GEMMA3_LAYER_TYPES[i > 0] for i in range(config["num_hidden_layers"])]
    if isinstance(value, dict):
        new = {"rope_theta": 77.0}
        return {"full_attention": new} if "full_attention" in value else new
    if field == "rope_scaling":
        return {"type": "linear", "factor": 2.0}
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return []
    return 2 if value is None else value * 3


def changing(family: str) -> dict[str, Any]:
    """Takes a family's config with sliding layers on and its pattern not spelled out."""
    config = dict(HF[f"{family}-0"]["config"])
    config.pop("layer_types", None)
    if "use_sliding_window" in names(FAMILIES[family].used):
        config |= {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    if family == "mixtral":
        config |= {"sliding_window": 16}
    if "rope_interleave" in names(FAMILIES[family].used):
        config |= {"rope_interleave": True}
    return config


@pytest.mark.parametrize(
    ("family", "field"),
    [(f, field) for f in FAMILIES if f"{f}-0" in HF for field in sorted(names(FAMILIES[f].used))],
)
def test_every_used_field_counts(family: str, field: str) -> None:
    config = changing(family)
    before = read_config(config)
    try:
        after = read_config(config | {field: mutated(config.get(field), field, config)})
    except ValueError as error:
        assert field in str(error)
    else:
        assert after != before


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_of_fields_do_not_overlap(family: str) -> None:
    used, ignored = names(FAMILIES[family].used), names(FAMILIES[family].ignored)
    assert not used & ignored
    assert not (used | ignored) & (IRRELEVANT | set(ONLY))
    assert not set(FAMILIES[family].spellings) & (used | ignored)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_size": None}, "llama config: field 'hidden_size' is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0, want a whole number >= 1"),
        ({"vocab_size": 96.0}, "vocab_size = 96.0, want"),
        ({"num_key_value_heads": 4}, "6 query heads are no multiple of 4 KV heads"),
        (
            {"model_type": "mamba"},
            "unknown model_type 'mamba' in the config; known are bloom, deepseek_v2",
        ),
        ({"model_type": None}, "names no model_type"),
    ],
)
def test_bad_configs_are_named(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        read_config(LLAMA | change)


def test_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    with pytest.raises(ValueError, match="no config at"):
        read_config(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    other = folder / "other.json"
    other.write_text(json.dumps(LLAMA | {"_name_or_path": "a/b-7B/"}), "utf-8")
    assert read_config(folder).name == read_config(folder / "config.json").name == "tiny"
    assert read_config(other).name == "b-7B"
    assert read_config(str(other), name="mine").name == "mine"
    for text, word in (("{", "is no JSON"), ("[]", "holds a list"), ("\xff", "is no JSON")):
        other.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=word):
            read_config(other)


def test_every_family_has_a_case() -> None:
    covered = {case.rsplit("-", 1)[0] for case in HF}
    assert covered | {"kimi_k2"} == set(FAMILIES)
    assert {wrapper.model_type for wrapper in WRAPPERS.values()} <= covered


@pytest.mark.parametrize("name", preset_names())
def test_preset_has_about_its_published_parameters(name: str) -> None:
    entry, geometry = preset(name), load_geometry(name)
    assert set(entry) == {"source", "published_parameters", "published_source", "config"}
    assert entry["source"] and entry["published_source"] and geometry.name == name
    assert geometry.parameters == pytest.approx(entry["published_parameters"], rel=0.014)


def test_presets_are_there_by_name() -> None:
    wanted = """gpt2-xl gpt3-175b llama2-70b llama3-8b deepseek-v3 llama2-7b llama2-13b llama3-70b
        llama3-405b qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-32b qwen3-30b-a3b
        qwen3-235b-a22b gemma3-1b gemma3-4b gemma3-12b gemma3-27b gemma3n-e2b gemma3n-e4b
        gpt-oss-20b gpt-oss-120b
        mixtral-8x7b mixtral-8x22b deepseek-v2 deepseek-v2-lite kimi-k2"""
    assert set(wanted.split()) == set(preset_names())
    assert load_geometry("Llama3-8B") == load_geometry("llama3-8b")


def test_unknown_preset_names_close_ones() -> None:
    with pytest.raises(
        ValueError, match="unknown model 'lama3-8b': .* close presets are llama3-8b"
    ):
        load_geometry("lama3-8b")
    with pytest.raises(ValueError, match="presets are deepseek-v2, .*qwen3-8b"):
        load_geometry("zzz")
    with pytest.raises(ValueError, match="unknown model 'gpt2': close presets are"):
        preset("gpt2")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("ring", 4), "want full, window, state or shared"),
        (("full", 4), "full and window need one"),
        (("state", 4, KVSpec(2, 8, 8)), "a state layer with spec"),
        (("window", 4, KVSpec(2, 8, 8)), "window layers need one"),
        (("full", 4, KVSpec(2, 8, 8), 16), "a full layer with window 16"),
        (("window", 4, KVSpec(2, 8, 8), 0), "want at least 1 token"),
        (("full", 5, KVSpec(2, 8, 8)), "5 query heads are no multiple of 2"),
        (("full", 4, KVSpec(2, 8, 8), None, None, None, 0, 1), "a full layer with source 1"),
    ],
)
def test_layer_kinds_go_with_their_fields(arguments: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        LayerSpec(*arguments)
    with pytest.raises(ValueError, match="state_bytes 8"):
        LayerSpec("shared", 4, state_bytes=8)
    with pytest.raises(ValueError, match="at least one layer"):
        ModelGeometry("none", 8, 8, (), 8)
    full, reader = LayerSpec("full", 4, KVSpec(2, 8, 8)), LayerSpec("shared", 4, source=1)
    for layers in ((full, reader), (full, LayerSpec("shared", 4), reader)):
        with pytest.raises(ValueError, match="reads layer 1: want an earlier one that keeps"):
            ModelGeometry("odd", 8, 8, layers, 8)
    with pytest.raises(ValueError, match="vocab 0"):
        ModelGeometry("none", 0, 8, (LayerSpec("shared", 4),), 8)
