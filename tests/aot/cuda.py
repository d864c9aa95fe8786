# SPDX-License-Identifier: Apache-2.0
"""Compiles attention for a GPU that need not be there, and prints what came of it as JSON.

`python -m tests.aot.cuda CHIP` needs the CUDA plugin of JAX and cuDNN; `tests/aot/test_cuda.py`
runs it with a ptxas that keeps what it is given.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.ops.api import attention

B, T, N, K = 1, 4096, 8, 2
BF16 = jnp.bfloat16


def gpu_mesh(chip: str) -> Mesh:
    """Builds a mesh of one GPU from the descriptions that are embedded in JAX's plugin."""
    import jax_plugins.xla_cuda13 as plugin

    found = (Path(plugin.__file__).parent / "xla_cuda_plugin.so").read_bytes()
    for match in re.finditer(rb"gpu_device_info \{\n", found):
        text = found[match.start() : found.index(b"\0", match.start())].decode("utf8", "replace")
        if f'device_description_str: "{chip}"' in text:
            topology = topologies.get_topology_desc(
                "gpu", "cuda", target_config=text, topology="1x1x1"
            )
            return Mesh(np.array(topology.devices[:1]), ("data",))
    raise SystemExit(f"JAX's plugin describes no {chip}.")


def call(H: int, V: int = 0, dtype: Any = BF16, **options: Any) -> tuple[Callable, list[Any]]:
    """Builds a call of `[1, 4096, 8, H]` queries and 2 KV heads, and its arguments."""
    shape = jax.ShapeDtypeStruct
    arrays = [
        shape((B, T, N, H), dtype),
        shape((B, T, K, H), dtype),
        shape((B, T, K, V or H), dtype),
    ]
    traced = {n: x for n, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {n: x for n, x in options.items() if n not in traced}

    def run(query: Any, key: Any, value: Any, traced: dict) -> Any:
        return attention(query, key, value, return_lse=True, **static, **traced)

    return run, [*arrays, traced]


def gradient(run: Callable, by_lse: bool) -> Callable:
    """Turns a call into its gradient, through the log-sum-exp too if wanted."""

    def loss(query: Any, key: Any, value: Any, traced: dict) -> jax.Array:
        out, lse = run(query, key, value, traced)
        return out.astype(jnp.float32).sum() + (lse.sum() if by_lse else 0.0)

    return jax.grad(loss, argnums=(0, 1, 2))


def cases() -> Iterator[tuple[str, Callable, list[Any]]]:
    """Names what is compiled."""
    rows = jax.ShapeDtypeStruct((B,), jnp.int32)
    segments = jax.ShapeDtypeStruct((B, T), jnp.int32)
    sinks = jax.ShapeDtypeStruct((N,), jnp.float32)
    calls = {
        "cudnn causal": call(128, causal=True, implementation="cudnn"),
        "cudnn window": call(64, causal=True, window=512, implementation="cudnn"),
        "cudnn lengths": call(64, causal=True, key_lengths=rows, implementation="cudnn"),
        "cudnn sinks": call(128, causal=True, sink_logits=sinks, implementation="cudnn"),
        "triton 64": call(64, causal=True, implementation="triton"),
        "triton 128": call(128, causal=True, implementation="triton"),
        "triton 256": call(256, causal=True, implementation="triton"),
        "triton 192/128": call(192, 128, causal=True, implementation="triton"),
        "triton documents": call(
            128, causal=True, query_segments=segments, soft_cap=50.0, implementation="triton"
        ),
        "triton window": call(128, causal=True, window=512, offset=rows, implementation="triton"),
        "triton float32": call(64, dtype=jnp.float32, causal=True, implementation="triton"),
    }
    for name, (run, arguments) in calls.items():
        yield f"{name} forward", run, arguments
        yield f"{name} gradient", gradient(run, "sinks" in name), arguments


def main(chip: str) -> None:
    """Compiles every case, a line of JSON for each."""
    mesh = gpu_mesh(chip)
    whole = NamedSharding(mesh, PartitionSpec())
    for name, fn, arguments in cases():
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), arguments
        )
        with jax.set_mesh(mesh):
            compiled = jax.jit(fn).lower(*placed).compile()
        targets = set(re.findall(r'custom_call_target="([^"]+)"', compiled.as_text()))
        temporary = compiled.memory_analysis().temp_size_in_bytes
        print(json.dumps({"case": name, "temporary": temporary, "targets": sorted(targets)}))
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
