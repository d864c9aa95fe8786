# SPDX-License-Identifier: Apache-2.0
"""Writes tests/fixtures/rotary/huggingface.json from Hugging Face transformers.

Run once, with torch 2.13 and transformers 5.24 installed (the package itself needs neither):
`python scripts/make_rotary_fixtures.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from transformers import CohereConfig, DeepseekV3Config, GPTNeoXConfig, LlamaConfig
from transformers.models.cohere import modeling_cohere
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

TARGET = Path(__file__).parents[1] / "tests" / "fixtures" / "rotary" / "huggingface.json"

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}

# name -> head width, longest sequence, rope parameters
SCALINGS = {
    "default": (16, 2048, {"rope_type": "default", "rope_theta": 10_000.0}),
    "theta": (24, 2048, {"rope_type": "default", "rope_theta": 500_000.0}),
    "linear": (16, 2048, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}),
    "dynamic": (8, 16, {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}),
    "llama3": (
        128,
        131_072,
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": (16, 8192, {**YARN, "rope_theta": 10_000.0}),
    "yarn_exact_ends": (16, 8192, {**YARN, "rope_theta": 10_000.0, "truncate": False}),
    "yarn_betas": (
        64,
        8192,
        {**YARN, "rope_theta": 150_000.0, "beta_fast": 16.0, "beta_slow": 2.0},
    ),
    "yarn_mscales": (
        64,
        163_840,
        {
            **YARN,
            "rope_theta": 10_000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
    ),
    "yarn_one_mscale": (16, 8192, {**YARN, "rope_theta": 10_000.0, "mscale": 0.5}),
    "yarn_given_factor": (16, 8192, {**YARN, "rope_theta": 10_000.0, "attention_factor": 1.5}),
}


def scaling_case(name: str) -> dict:
    """Computes frequencies and cos, sin of one configuration."""
    head, longest, parameters = SCALINGS[name]
    config = LlamaConfig(
        hidden_size=2 * head,
        num_attention_heads=2,
        head_dim=head,
        max_position_embeddings=8 if name == "dynamic" else longest,
        rope_parameters=dict(parameters),
    )
    module = modeling_llama.LlamaRotaryEmbedding(config)
    # The last position sets the base of dynamic; elsewhere float32 angles stay exact to 1e-5.
    positions = torch.tensor([[0, 1, 5, min(longest, 64) - 1]])
    cos, sin = module(torch.zeros(1), positions)
    return {
        "head_width": head,
        "length": longest,
        "parameters": parameters,
        "frequencies": module.inv_freq.tolist(),
        "magnitude": float(module.attention_scaling),
        "positions": positions[0].tolist(),
        "cos": cos[0, :, : head // 2].tolist(),
        "sin": sin[0, :, : head // 2].tolist(),
    }


def rotation_cases() -> dict:
    """Rotates one random array as four model families do, `[B, T, N, H]`."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 2, 8)
    positions = torch.tensor([[0, 1, 2], [7, 100, 3]])
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    partial = {**plain, "partial_rotary_factor": 0.5}
    heads = {"hidden_size": 16, "num_attention_heads": 2, "rope_parameters": plain}

    def run(module: object, config: object, embedding: type, apply: str) -> list:
        cos, sin = embedding(config)(x, positions)
        out, _ = getattr(module, apply)(x, x, cos, sin, unsqueeze_dim=2)
        return out.tolist()

    llama, neox = modeling_llama, modeling_gpt_neox
    cohere, deepseek = modeling_cohere, modeling_deepseek_v3
    apply = "apply_rotary_pos_emb"
    v3 = DeepseekV3Config(**heads, qk_rope_head_dim=8)
    return {
        "x": x.tolist(),
        "positions": positions.tolist(),
        "half": run(llama, LlamaConfig(**heads), llama.LlamaRotaryEmbedding, apply),
        "half_partial": run(
            neox,
            GPTNeoXConfig(**{**heads, "rope_parameters": partial}),
            neox.GPTNeoXRotaryEmbedding,
            apply,
        ),
        "interleaved": run(cohere, CohereConfig(**heads), cohere.CohereRotaryEmbedding, apply),
        "interleaved_to_half": run(
            deepseek, v3, deepseek.DeepseekV3RotaryEmbedding, "apply_rotary_pos_emb_interleave"
        ),
    }


def shortened(value: object) -> object:
    """Rounds every number to the 9 digits that a float32 has at most."""
    if isinstance(value, dict):
        return {name: shortened(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def score_scale(mscale: float, mscale_all_dim: float) -> float:
    """Reads the softmax scale of a DeepSeek-V3 layer with key width 128 + 64."""
    parameters = {
        **YARN,
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }
    config = DeepseekV3Config(
        hidden_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        q_lora_rank=None,
        kv_lora_rank=4,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=4,
        max_position_embeddings=163_840,
        rope_parameters=parameters,
    )
    return float(modeling_deepseek_v3.DeepseekV3Attention(config, 0).scaling)


def main() -> None:
    """Writes the file."""
    fixture = {
        "source": (
            f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, "
            "float32, by scripts/make_rotary_fixtures.py"
        ),
        "scalings": {name: scaling_case(name) for name in SCALINGS},
        "rotations": rotation_cases(),
        "deepseek_softmax_scales": [
            {"mscale": m, "mscale_all_dim": a, "scale": score_scale(m, a)}
            for m, a in ((1.0, 1.0), (1.0, 0.707), (1.0, 0.0))
        ],
    }
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps(shortened(fixture)) + "\n")


if __name__ == "__main__":
    main()
