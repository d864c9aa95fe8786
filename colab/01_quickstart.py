# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   accelerator: TPU
# ---

# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/01_quickstart.ipynb)
#
# # jaxkv in ten minutes
#
# A language model remembers by its KV cache. This notebook trains the same small model with four kinds of attention, decodes from each cache, and shows what it costs. It runs on a TPU, a GPU or a plain CPU: *Runtime > Change runtime type*.

# %%
# The repository, and the extra that fits the accelerator of this machine.
REPOSITORY = "https://github.com/jaxkv/jaxkv"

import importlib.util
import os
import shutil
import subprocess
import sys

if importlib.util.find_spec("jaxkv") is None:
    extras = "cli,train"
    if os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0"):
        extras += ",tpu"
    elif shutil.which("nvidia-smi"):
        extras += ",cuda13"
    wanted = f"jaxkv[{extras}] @ git+{REPOSITORY}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", wanted], check=True)

# %%
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv import Decoder, GroupedQueryAttention, MultiHeadLatentAttention, Rotary, generate

# "tiny" is what the tests run, with two variants and few steps; elsewhere the size follows the device.
SIZE = os.environ.get("JAXKV_NOTEBOOK_SIZE") or (
    "small" if jax.default_backend() == "cpu" else "medium"
)
print(jax.device_count(), "x", jax.devices()[0].device_kind, "- size:", SIZE)

# %% [markdown]
# ## One layer
#
# Training is a call without a cache. Prefill, append and decode are the same call with one. Donate the cache: it is written in place, and the one that comes back is the one to use.

# %%
attn = GroupedQueryAttention(512, num_heads=8, rotary=Rotary(), rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(0), (2, 16, 512))
y, _ = attn(x)

cache = attn.init_cache(batch=2, capacity=1024)
step = jax.jit(lambda attn, x, cache: attn(x, cache=cache), donate_argnums=2)
_, cache = step(attn, x[:, :15], cache)
last, cache = step(attn, x[:, 15:], cache)

print("tokens held:", cache.lengths, "- bytes per token:", cache.bytes_per_token)
print("largest difference:", float(jnp.max(jnp.abs(last[:, 0] - y[:, -1]))))

# %% [markdown]
# Change the class name and the cache changes with it:

# %%
for variant in (
    jaxkv.MultiHeadAttention,
    jaxkv.GroupedQueryAttention,
    jaxkv.MultiQueryAttention,
    jaxkv.MultiHeadLatentAttention,
):
    attn = variant(512, num_heads=8, rotary=Rotary(), rngs=nnx.Rngs(0))
    print(f"{variant.__name__:26}", attn.init_cache(batch=1, capacity=8).bytes_per_token, "bytes")

# %% [markdown]
# ## The comparison
#
# The same as `jaxkv compare` on a command line: equal parameter totals, data order and tokens; only the attention differs.

# %%
from IPython.display import Image, display

from jaxkv.cli.compare import compare

OUTPUT = Path("jaxkv-compare")
shorter = {"variants": "mha,mla", "steps": 8} if SIZE == "tiny" else {}
compare(size=SIZE, output=OUTPUT, **shorter)
for picture in ("loss.png", "cache.png", "real_models.png"):
    display(Image(str(OUTPUT / picture)))

# %% [markdown]
# ## A model of your own
#
# Layers may differ: here every second one is latent attention. Prompts of different lengths are decoded together.

# %%
latent = functools.partial(MultiHeadLatentAttention, num_heads=8, rotary=Rotary())
grouped = functools.partial(GroupedQueryAttention, num_heads=8, rotary=Rotary())
model = Decoder(256, 128, 4, [grouped, latent, grouped, latent], rngs=nnx.Rngs(0))
made = generate(model, [list(b"To be"), list(b"Or not to be")], max_new_tokens=16)
print(made.counts, made.why(), "- the cache takes", made.cache.nbytes, "bytes")

# %% [markdown]
# ## Several devices
#
# Parameters and caches carry logical axis names; a mesh with `data` and `tensor` axes is all that is needed. With one device this cell does the same on a mesh of one.

# %%
from jaxkv.training import init_sharded

tensor = 2 if jax.device_count() % 2 == 0 else 1
mesh = jax.make_mesh(
    (jax.device_count() // tensor, tensor),
    ("data", "tensor"),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
)
with jax.set_mesh(mesh):
    sharded = init_sharded(lambda: Decoder(256, 128, 2, grouped, rngs=nnx.Rngs(0)), mesh)
    tokens = jnp.zeros((2 * jax.device_count(), 8), jnp.int32)
    logits, held = jax.jit(lambda m, t: m(t, cache=m.init_cache(t.shape[0], 16)))(sharded, tokens)
print(logits.shape, "on", jax.device_count(), "devices; rows hold", held.lengths[:4], "...")
