# SPDX-License-Identifier: Apache-2.0
"""Attention compiled for GPUs that need not be there: what is called, memory, registers, spills.

It needs the CUDA plugin of JAX, cuDNN and a ptxas, all of which run without a GPU:
`pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cudnn-cu13`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full
CHIPS = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200 141GB HBM3e", "NVIDIA B200")
ROOT = Path(__file__).parents[2]
MIB = 2**20
# The queries are 8 MiB at 128 wide in 16 bits. A call may empty what is padding, and a gradient
# holds the output and a few more; nothing grows with the square of the tokens (32 MiB a head).
MOST = {"forward": 14 * MIB, "gradient": 36 * MIB}
# Bytes a thread. Wider tiles would spill hundreds; these are a soft-cap and segments together.
MOST_SPILLED = 64
KEEPING = """#!/bin/sh
for a in "$@"; do
  if [ -f "$a" ] && grep -q "entry flash_" "$a"; then cp "$a" "{folder}/$$.ptx"; fi
done
exec "{ptxas}" "$@"
"""


@pytest.fixture(autouse=True)
def as_users_have_it() -> None:
    """Overrides the folder's fixture: these tests need another compiler."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("no CUDA plugin: `pip install jax-cuda13-plugin jax-cuda13-pjrt` brings it.")
    if shutil.which("ptxas") is None:
        pytest.skip("no ptxas: the CUDA toolkit brings it.")


def compile_all(chip: str, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compiles every case; gives what XLA says of each, and ptxas of each kernel of ours."""
    ptxas = shutil.which("ptxas")
    wrapper = folder / "bin" / "ptxas"
    wrapper.parent.mkdir()
    wrapper.write_text(KEEPING.format(folder=folder, ptxas=ptxas))
    wrapper.chmod(0o755)
    settings = {
        "XLA_FLAGS": "--xla_gpu_enable_libnvptxcompiler=false --xla_gpu_enable_libnvjitlink=false",
        "PATH": f"{wrapper.parent}:{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    run = subprocess.run(
        [sys.executable, "-m", "tests.aot.cuda", chip],
        env=os.environ | settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = [one for ptx in sorted(folder.glob("*.ptx")) for one in described(str(ptxas), ptx)]
    return [json.loads(line) for line in run.stdout.splitlines()], kernels


def described(ptxas: str, ptx: Path) -> list[dict[str, Any]]:
    """Asks ptxas for registers and spills of the kernels of a file."""
    text = ptx.read_text()
    arch = re.search(r"\.target (sm_\w+)", text)
    assert arch is not None
    command = [ptxas, "-v", f"-arch={arch[1]}", str(ptx), "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    out = []
    for name, rest in re.findall(
        r"entry function '(flash_\w+)'(.*?Used \d+ registers)", said, re.S
    ):
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", rest)]
        registers = int(rest.split()[-2])
        fast = "wgmma" if "wgmma" in text else "tcgen05" if "tcgen05.mma" in text else "mma"
        out.append({"kernel": name, "registers": registers, "spills": spills, "products": fast})
    return out


@pytest.mark.parametrize("chip", CHIPS)
def test_attention_compiles_and_stays_in_registers(chip: str, tmp_path: Path) -> None:
    cases, kernels = compile_all(chip, tmp_path)
    for case in cases:
        name, targets = case["case"], case["targets"]
        vendor = [t for t in targets if t.startswith("__cudnn")]
        ours = "triton" in name or ("sinks" in name and "gradient" in name)
        assert bool(vendor) == name.startswith("cudnn"), case
        assert ("__gpu$xla.gpu.triton" in targets) == ours, case
        assert case["temporary"] <= MOST[name.split()[-1]], case
    assert {k["kernel"] for k in kernels} == {
        *("flash_forward", "flash_backward_queries", "flash_backward_keys")
    }
    for line in sorted({str(sorted(k.items())) for k in kernels}):
        print(chip, line)
    assert [k for k in kernels if max(k["spills"]) > MOST_SPILLED] == []
