# SPDX-License-Identifier: Apache-2.0
"""The `plan` command on its own, as the main program registers it."""

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from jaxkv.cli.plan import parse_devices, plan
from jaxkv.models.presets import preset, preset_names


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(plan)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "160", "TERM": "dumb"})


def error_of(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code != 0 and isinstance(result.exception, ValueError)
    return str(result.exception)


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("gpt2-xl", 307_200),
        ("gpt3-175b", 4_718_592),
        ("llama2-70b", 327_680),
        ("llama3-8b", 131_072),
        ("deepseek-v3", 70_272),
    ],
)
@pytest.mark.parametrize(
    "more", [(), ("--dtype", "float32", "--devices", "tensor=1,data=2"), ("--dtype", "int4")]
)
def test_first_bytes_per_token_is_the_whole_models_in_bf16(
    name: str, figure: int, more: tuple[str, ...]
) -> None:
    result = run(name, "--json", *more)
    assert result.exit_code == 0
    first = re.search(r'"bytes_per_token": (\d+)', result.stdout)
    assert first is not None and int(first[1]) == figure
    assert json.loads(result.stdout)["bytes_per_token"] == figure


def test_json_holds_every_figure() -> None:
    options = "--context 8192 --batch 32 --windows full --devices tensor=4,data=2 --chip h200"
    found = json.loads(run("gpt-oss-20b", "--json", *options.split()).stdout)
    assert found["cache"]["bytes_per_sequence"] * 32 == 12 * 2**30
    assert found["cache"]["per_head_bytes_per_token"] == 8 * 49_152
    assert found["per_device"]["bytes_per_sequence"] * 32 == 3 * 2**30
    assert found["per_device"]["rows"] == 16
    assert [(g["kind"], g["count"], g["slots"]) for g in found["layers"]] == [
        ("window", 12, 8192),
        ("full", 12, 8192),
    ]
    assert found["chip"] == "h200 (141 GB)"
    assert found["fit"]["memory_bytes_per_device"] == 141 * 10**9
    assert found["fit"]["sequences"] == 2 * found["fit"]["sequences_per_device"] > 0


def test_json_of_codecs_and_layouts() -> None:
    options = "--context 8190 --dtype int4:32 --windows"
    ring = json.loads(run("gpt-oss-20b", "--json", *options.split(), "window").stdout)
    paged = json.loads(run("gpt-oss-20b", "--json", *options.split(), "pages:16").stdout)
    # 24 layers, keys and values of 8 heads: 64 channels of 4 bits, and 2 scales.
    token = 24 * 2 * 8 * (32 + 2 * 4)
    assert ring["dtype"] == "int4:32" and ring["cache"]["bytes_per_token"] == token
    assert ring["cache"]["bytes_per_sequence"] == token // 2 * (128 + 8190)
    assert paged["cache"]["bytes_per_sequence"] == token * 8192
    # Lengths and flags, a table of 512 pages, a count of references for each.
    assert paged["cache"]["nbytes"] == token * 8192 + 6 + 2 * 512 * 4
    layouts = [[layer["layout"] for layer in found["layers"]] for found in (ring, paged)]
    assert layouts[0] == ["Ring(window=128, pinned=0, spare=0)", "Contiguous()"]
    assert layouts[1] == ["Paged(size=16, pages=None)"] * 2
    assert [layer["slots"] for layer in ring["layers"]] == [128, 8190]
    assert [layer["slots"] for layer in paged["layers"]] == [8192, 8192]


@pytest.mark.parametrize(
    ("windows", "layout", "slots"),
    [
        ("ring:512", "Ring(window=512, pinned=0, spare=0)", 512),
        ("sinks:508+16", "Ring(window=508, pinned=4, spare=16)", 528),
        ("pages:16x300", "Paged(size=16, pages=300)", 8192),
    ],
)
def test_json_of_other_policies(windows: str, layout: str, slots: int) -> None:
    options = ("--context", "8190", "--batch", "7", "--windows", windows)
    found = json.loads(run("llama3-8b", "--json", *options).stdout)
    assert found["windows"] == windows
    (layer,) = found["layers"]
    assert (layer["layout"], layer["slots"]) == (layout, slots)
    assert found["cache"]["bytes_per_sequence"] == slots * 131_072


def test_tables_for_people() -> None:
    result = run("llama3-8b", "--chip", "h100", "--context", "8192")
    assert result.exit_code == 0
    for part in ("131,072", "1.000 GiB = 1.074 GB", "(4.0 times)", "h100 (80 GB)", "59"):
        assert part in result.stdout


def test_config_file_and_folder(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(preset("qwen3-0.6b")["config"]), "utf-8")
    for source in (file, file.parent):
        found = json.loads(run(str(source), "--json").stdout)
        assert (found["model"], found["bytes_per_token"]) == ("mine", 114_688)


def test_plot_is_written_and_json_stays_clean(tmp_path: Path) -> None:
    file = tmp_path / "cache.png"
    assert f"Plot: {file}" in run("gemma3-1b", "--plot", str(file)).stdout.replace("\n", "")
    assert file.stat().st_size > 0
    json.loads(run("gemma3-1b", "--json", "--plot", str(file)).stdout)


def test_no_name_lists_the_presets() -> None:
    message = error_of()
    assert all(name in message for name in preset_names()) and "\n" not in message


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("lama3-8b", "close presets are llama3-8b"),
        ("gpt2-xl --chip h1000", "unknown chip 'h1000'; known are h100"),
        ("gpt2-xl --devices tensor", "devices 'tensor': want axes with counts"),
        ("gpt2-xl --devices data=2,data=4", "want axes with counts"),
        ("gpt2-xl --devices model=2", "unknown device axes"),
        ("gpt2-xl --dtype int3", "dtype 'int3'"),
        ("gpt2-xl --dtype fp8:32", "dtype 'fp8:32'"),
        ("gpt2-xl --weights lots", "size 'lots'"),
        ("gpt2-xl --windows ring", "window policy 'ring': want ring:W, ring:W+S"),
        ("gpt2-xl --windows snapkv:512", "want snapkv:Z+R, snapkv:Z+R/pyramid"),
        ("gpt2-xl --context 0", "context 0"),
        ("gpt2-xl --plot nowhere/a.png", "no folder"),
    ],
)
def test_user_errors_are_one_line(arguments: str, word: str) -> None:
    message = error_of(*arguments.split())
    assert word in message and "\n" not in message


def test_devices_may_have_spaces_or_be_empty() -> None:
    assert parse_devices(" tensor = 8 , data=2,") == {"tensor": 8, "data": 2}
    assert parse_devices("") == {}


def test_a_codec_of_groups_says_what_window_layers_can_do() -> None:
    said = error_of("gpt-oss-20b", "--dtype", "kivi")
    assert "Window layers keep every token with --windows full" in said
    assert run("gpt-oss-20b", "--dtype", "kivi", "--windows", "full").exit_code == 0
    assert "--windows full" not in error_of("llama3-8b", "--dtype", "kivi:32", "--windows", "h2o:8")
