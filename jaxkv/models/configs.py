# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face `config.json` into what each layer of the model keeps.

A new model type is one entry in `FAMILIES`: how its layers are read, how its parameters are
counted, and which fields it knows. Fields in no table raise, since they may change the cache.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxkv.cache.spec import KVSpec
from jaxkv.core.alibi import alibi_slopes
from jaxkv.core.rotary import Rotary
from jaxkv.models import parameters
from jaxkv.models.config_fields import Fields, names
from jaxkv.models.config_rotary import ROTARY_FIELDS, read_rotary, read_rotary_by_kind
from jaxkv.models.geometry import LayerSpec, ModelGeometry

Layers = tuple[LayerSpec, ...]
Windowed = Callable[[int], bool]
Slopes = Callable[[int], tuple[float, ...] | None]


@dataclasses.dataclass(frozen=True)
class Family:
    """States how one model type is read.

    Args:
      layers: Reads the layers.
      parameters: Counts the parameters.
      used: Names of the fields that both read, besides those of every model.
      ignored: Names of further fields, which say nothing about cache or parameter count.
      spellings: Other name -> the name used here.
      defaults: Values of fields that configs of this type leave out.
    """

    layers: Callable[[Fields], Layers]
    parameters: Callable[[Fields, Layers], int]
    used: str = ""
    ignored: str = ""
    spellings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def fields(self, config: Mapping[str, Any], model_type: str) -> Fields:
        """Sorts a config's fields into used and ignored ones."""
        return Fields(
            config,
            model_type,
            used=names(_EVERY) | names(self.used),
            ignored=names(self.ignored),
            spellings=self.spellings,
            defaults=self.defaults,
        )


_EVERY = """vocab_size hidden_size num_hidden_layers num_attention_heads max_position_embeddings
    tie_word_embeddings"""
_ROTARY = " ".join(sorted(ROTARY_FIELDS))
_GROUPED = f"num_key_value_heads head_dim intermediate_size attention_bias {_ROTARY}"
_WINDOWED = f"{_GROUPED} sliding_window layer_types"
_LATENT = f"""kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim attention_bias
    intermediate_size moe_intermediate_size n_routed_experts n_shared_experts first_k_dense_replace
    moe_layer_freq rope_interleave {_ROTARY}"""
_LATENT_IGNORED = """num_key_value_heads head_dim qk_head_dim mlp_bias aux_loss_alpha ep_size
    n_group norm_topk_prob num_experts_per_tok num_mtp_layers num_nextn_predict_layers
    pretraining_tp routed_scaling_factor scoring_func seq_aux topk_group topk_method"""

_MPT_IGNORED = "attn_impl attn_pdrop attn_uses_sequence_id clip_qkv prefix_lm softmax_scale"


def _grouped_record(fields: Fields) -> tuple[int, KVSpec]:
    """Reads N and the record; an explicit head width wins over D / N, missing KV heads mean N."""
    heads = fields.size("num_attention_heads")
    width = fields.get("head_dim")
    if width is None:
        width, rest = divmod(fields.size("hidden_size"), heads)
        if rest:
            raise ValueError(
                f"{fields.family} config: {heads} heads do not divide hidden_size "
                f"{fields.size('hidden_size')}, and there is no head_dim."
            )
    else:
        width = fields.size("head_dim")
    return heads, KVSpec(fields.size("num_key_value_heads", heads), width, width)


def _windowed_layers(
    fields: Fields,
    windowed: Windowed,
    full: Rotary,
    local: Rotary | None = None,
    switched_on: bool = True,
) -> Layers:
    """Makes each layer full or sliding: by `layer_types` where given, else by `windowed`."""
    heads, record = _grouped_record(fields)
    sliding = _sliding(fields, windowed)
    if any(sliding) and (fields.get("sliding_window") is None or not switched_on):
        raise ValueError(
            f"{fields.family} config: layer {sliding.index(True)} slides, but sliding_window is "
            f"{'null' if switched_on else 'switched off by use_sliding_window'}."
        )
    window = fields.size("sliding_window") if any(sliding) else None
    global_layer = LayerSpec("full", heads, record, rotary=full)
    if window is None:
        return (global_layer,) * len(sliding)
    local_layer = LayerSpec("window", heads, record, window, rotary=local or full)
    return tuple(local_layer if slides else global_layer for slides in sliding)


def _sliding(fields: Fields, windowed: Windowed) -> list[bool]:
    count, types = fields.size("num_hidden_layers"), fields.get("layer_types")
    if types is None:
        return [windowed(i) for i in range(count)]
    if len(types) != count:
        raise ValueError(f"{fields.family} config: {len(types)} layer_types for {count} layers.")
    meaning = {"full_attention": False, "sliding_attention": True}
    strange = sorted({str(kind) for kind in types} - set(meaning))
    if strange:
        raise ValueError(
            f"{fields.family} config: unknown layer_types {strange}, known are {sorted(meaning)}."
        )
    return [meaning[kind] for kind in types]


def _by_head(fields: Fields, alibi: Slopes = lambda heads: None) -> Layers:
    """Gives each query head a key and a value of its own, without rotation."""
    heads = fields.size("num_attention_heads")
    width, rest = divmod(fields.size("hidden_size"), heads)
    if rest:
        raise ValueError(
            f"{fields.family} config: {heads} heads do not divide width {heads * width + rest}."
        )
    layer = LayerSpec("full", heads, KVSpec(heads, width, width), alibi=alibi(heads))
    return (layer,) * fields.size("num_hidden_layers")


def _mpt(fields: Fields) -> Layers:
    inner = Fields(
        fields.get("attn_config", {}),
        f"{fields.family} attn_config",
        used=names("alibi alibi_bias_max attn_type qk_ln"),
        ignored=names(_MPT_IGNORED),
    )
    only = {"alibi": True, "attn_type": "multihead_attention", "qk_ln": False}
    for part, wanted in ((inner, only), (fields, {"no_bias": True})):
        for name, value in wanted.items():
            if part.get(name, value) != value:
                raise ValueError(
                    f"{part.family} config: {name} = {part.get(name)!r}: want {value}."
                )
    most = inner.size("alibi_bias_max", 8)
    return _by_head(fields, lambda heads: tuple(x ** (most / 8) for x in alibi_slopes(heads)))


def _grouped(fields: Fields) -> Layers:
    heads, record = _grouped_record(fields)
    layer = LayerSpec("full", heads, record, rotary=read_rotary(fields))
    return (layer,) * fields.size("num_hidden_layers")


def _all_windowed(fields: Fields, theta: float = 10_000.0) -> Layers:
    slides = fields.get("sliding_window") is not None
    return _windowed_layers(fields, lambda i: slides, read_rotary(fields, theta=theta))


def _qwen(fields: Fields, staged: bool = True) -> Layers:
    """Slides only where it is switched on and, if `staged`, from layer `max_window_layers` on."""
    on = fields.flag("use_sliding_window")
    slides = on and fields.get("sliding_window") is not None
    first = fields.count("max_window_layers") if staged else 0
    return _windowed_layers(
        fields, lambda i: slides and i >= first, read_rotary(fields), switched_on=on
    )


def _gemma2(fields: Fields) -> Layers:
    return _windowed_layers(fields, lambda i: i % 2 == 0, read_rotary(fields))


def _mixed(fields: Fields, every: int) -> Layers:
    """Makes one layer of `every` full; full and sliding layers have bases of their own."""
    rotary = read_rotary_by_kind(
        fields,
        thetas={"full_attention": 1e6, "sliding_attention": 1e4},
        outer={"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
    )
    return _windowed_layers(
        fields,
        lambda i: (i + 1) % every != 0,
        rotary["full_attention"],
        rotary["sliding_attention"],
    )


def _gemma3(fields: Fields) -> Layers:
    return _mixed(fields, fields.size("sliding_window_pattern", 6))


def _gemma3n(fields: Fields) -> Layers:
    """Lets the last layers read the last one of their kind that has records of its own."""
    layers, shared = _mixed(fields, 5), fields.count("num_kv_shared_layers")
    first = len(layers) - shared
    sources = {layer: number for number, layer in enumerate(layers[: max(first, 0)])}
    for number, layer in enumerate(layers[max(first, 0) :], max(first, 0)):
        if layer not in sources:
            raise ValueError(
                f"{fields.family} config: num_kv_shared_layers = {shared}, but no layer before "
                f"{number} has records of its kind ({layer.kind}) that it could read."
            )
    return layers[:first] + tuple(
        LayerSpec("shared", layer.num_heads, rotary=layer.rotary, source=sources[layer])
        for layer in layers[first:]
    )


def _gpt_oss(fields: Fields) -> Layers:
    return _windowed_layers(fields, lambda i: i % 2 == 0, read_rotary(fields, theta=150_000.0))


def _latent(fields: Fields) -> Layers:
    """Stores latent and rotary key in one record, the value being its first C channels."""
    latent, rotary = fields.size("kv_lora_rank"), fields.size("qk_rope_head_dim")
    heads = fields.size("num_attention_heads")
    own = KVSpec(heads, fields.size("qk_nope_head_dim") + rotary, fields.size("v_head_dim"))
    layout = "interleaved" if fields.get("rope_interleave", True) else "half"
    layer = LayerSpec(
        "full",
        heads,
        KVSpec(1, latent + rotary, latent, value_offset=0),
        expanded=own,
        rotary=read_rotary(fields, layout=layout),
    )
    return (layer,) * fields.size("num_hidden_layers")


_DEEPSEEK = Family(_latent, parameters.deepseek, _LATENT, _LATENT_IGNORED)
_STAGED = f"{_WINDOWED} use_sliding_window max_window_layers"
_FIRST_SLIDING = {"max_window_layers": 28}

FAMILIES: dict[str, Family] = {
    "bloom": Family(
        partial(_by_head, alibi=alibi_slopes),
        parameters.bloom,
        ignored="""apply_residual_connection_post_layernorm attention_softmax_in_fp32
        bias_dropout_fusion hidden_dropout layer_norm_epsilon masked_softmax_fusion n_inner
        offset_alibi pretraining_tp skip_bias_add skip_bias_add_qkv slow_but_exact unk_token_id""",
        spellings={
            "n_embed": "hidden_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "seq_length": "max_position_embeddings",
        },
        defaults={"max_position_embeddings": 2048},
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gemma2": Family(
        _gemma2,
        partial(parameters.dense, norms=4, tied=True),
        _WINDOWED,
        "attn_logit_softcapping final_logit_softcapping hidden_activation query_pre_attn_scalar",
    ),
    "gemma3_text": Family(
        _gemma3,
        partial(parameters.dense, norms=4, head_norms=2, tied=True),
        f"{_WINDOWED} rope_local_base_freq sliding_window_pattern",
        "attn_logit_softcapping final_logit_softcapping hidden_activation query_pre_attn_scalar",
        spellings={"_sliding_window_pattern": "sliding_window_pattern"},
        # The text part of a multimodal config leaves out what equals its class's defaults.
        defaults={
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
        },
    ),
    "gemma3n_text": Family(
        _gemma3n,
        parameters.gemma3n,
        f"""{_WINDOWED} rope_local_base_freq num_kv_shared_layers vocab_size_per_layer_input
        hidden_size_per_layer_input altup_num_inputs laurel_rank""",
        """activation_sparsity_pattern altup_active_idx altup_coef_clip altup_correct_scale
        altup_lr_multiplier final_logit_softcapping hidden_activation query_pre_attn_scalar""",
        defaults={
            "vocab_size": 262_400,
            "hidden_size": 2048,
            "intermediate_size": 16_384,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32_768,
            "sliding_window": 512,
            "num_kv_shared_layers": 15,
            "vocab_size_per_layer_input": 262_144,
            "hidden_size_per_layer_input": 256,
            "altup_num_inputs": 4,
            "laurel_rank": 64,
        },
    ),
    "gpt2": Family(
        _by_head,
        parameters.gpt2,
        "n_inner",
        """activation_function attn_pdrop embd_pdrop layer_norm_epsilon n_ctx output_past
        reorder_and_upcast_attn resid_pdrop scale_attn_by_inverse_layer_idx scale_attn_weights
        summary_activation summary_first_dropout summary_proj_to_labels summary_type
        summary_use_proj""",
        spellings={
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "n_positions": "max_position_embeddings",
        },
    ),
    "gpt_oss": Family(
        _gpt_oss,
        parameters.gpt_oss,
        f"{_WINDOWED} num_local_experts",
        """experts_per_token initial_context_length num_experts_per_tok swiglu_alpha
        swiglu_limit""",
        spellings={"num_experts": "num_local_experts"},
        defaults={"attention_bias": True},
    ),
    "kimi_k2": _DEEPSEEK,
    "llama": Family(_grouped, parameters.dense, f"{_GROUPED} mlp_bias", "pretraining_tp"),
    "mistral": Family(_all_windowed, parameters.dense, _WINDOWED),
    "mixtral": Family(
        partial(_all_windowed, theta=1e6),
        parameters.mixtral,
        f"{_WINDOWED} num_local_experts",
        "num_experts_per_tok router_jitter_noise",
        spellings={"num_experts": "num_local_experts"},
    ),
    "mpt": Family(
        _mpt,
        parameters.mpt,
        "attn_config expansion_ratio no_bias",
        """emb_pdrop embedding_fraction init_config init_device layer_norm_epsilon learned_pos_emb
        logit_scale norm_type resid_pdrop tokenizer_name verbose""",
        spellings={
            "d_model": "hidden_size",
            "max_seq_len": "max_position_embeddings",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
        },
    ),
    "qwen2": Family(
        _qwen,
        partial(parameters.dense, query_bias=True),
        _STAGED,
        defaults=_FIRST_SLIDING,
    ),
    "qwen3": Family(
        _qwen,
        partial(parameters.dense, head_norms=2),
        _STAGED,
        defaults=_FIRST_SLIDING,
    ),
    "qwen3_moe": Family(
        partial(_qwen, staged=False),
        parameters.qwen3_moe,
        f"""{_WINDOWED} use_sliding_window num_experts moe_intermediate_size decoder_sparse_step
        mlp_only_layers""",
        "max_window_layers norm_topk_prob num_experts_per_tok",
        spellings={"num_local_experts": "num_experts"},
    ),
}


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """States where a multimodal config keeps its text model: the part, and its model type."""

    part: str
    model_type: str
    ignored: str


WRAPPERS = {
    "gemma3": Wrapper(
        "text_config",
        "gemma3_text",
        """boi_token_id boi_token_index eoi_token_id eoi_token_index image_token_id
        image_token_index mm_tokens_per_image tie_word_embeddings vision_config""",
    ),
    "gemma3n": Wrapper(
        "text_config",
        "gemma3n_text",
        """audio_config audio_soft_tokens_per_image audio_token_id boa_token_id boi_token_id
        eoa_token_id eoi_token_id image_token_id tie_word_embeddings vision_config
        vision_soft_tokens_per_image""",
    ),
}


def read_config(source: Mapping[str, Any] | str | Path, name: str | None = None) -> ModelGeometry:
    """Reads a model's geometry from a config.

    Args:
      source: The contents of a `config.json`, its path, or the folder that holds it.
      name: Name for tables; by default the config's own, or its folder's.

    Returns:
      The layers and what each keeps, with the parameter count.

    Raises:
      ValueError: If there is no such file, it is no JSON object, the model type is unknown, or a
        field is unknown, missing or out of range; the message names it.

    >>> geometry = read_config({"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024,
    ...                         "n_embd": 1600, "n_layer": 48, "n_head": 25})
    >>> len(geometry.layers), geometry.layers[0].spec.elements_per_token, geometry.parameters
    (48, 3200, 1557611200)
    """
    if isinstance(source, Mapping):
        config, fallback = source, None
    else:
        config, fallback = _load(Path(source))
    model_type = config.get("model_type")
    config, model_type = _unwrap(config, model_type)
    if model_type not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, *WRAPPERS]))
        if model_type is None:
            raise ValueError(
                "this config names no model_type, so it is none of Hugging Face's (a run of jaxkv "
                f"train writes another kind); known types are {known}."
            )
        raise ValueError(f"unknown model_type {model_type!r} in the config; known are {known}.")
    family = FAMILIES[model_type]
    fields = family.fields(config, model_type)
    layers = family.layers(fields)
    return ModelGeometry(
        name=name or _own_name(config) or fallback or model_type,
        vocab=fields.size("vocab_size"),
        features=fields.size("hidden_size"),
        layers=layers,
        max_context=fields.size("max_position_embeddings"),
        parameters=family.parameters(fields, layers),
    )


def _unwrap(config: Mapping[str, Any], model_type: Any) -> tuple[Mapping[str, Any], Any]:
    if model_type not in WRAPPERS:
        return config, model_type
    wrapper = WRAPPERS[model_type]
    used, ignored = names(wrapper.part), names(wrapper.ignored)
    text = Fields(config, model_type, used=used, ignored=ignored).get(wrapper.part)
    if not isinstance(text, Mapping):
        raise ValueError(f"{model_type} config: field {wrapper.part!r} is missing.")
    return text, text.get("model_type", wrapper.model_type)


def _own_name(config: Mapping[str, Any]) -> str | None:
    own = str(config.get("_name_or_path") or "").rstrip("/")
    return own.rsplit("/", 1)[-1] or None


def _load(path: Path) -> tuple[Mapping[str, Any], str]:
    """Reads JSON; the name that it goes by is its folder's, or its own if it is no config.json."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"no config at {str(path)!r}: want a config.json or a folder that holds one."
        )
    try:
        config = json.loads(file.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(file)!r} is no JSON: {error}.") from error
    if not isinstance(config, Mapping):
        raise ValueError(f"{str(file)!r} holds a {type(config).__name__}, want a JSON object.")
    named = file.resolve().parent.name if file.name == "config.json" else file.stem
    return config, named
