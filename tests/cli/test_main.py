# SPDX-License-Identifier: Apache-2.0
"""The command line: the whole comparison, a run of one's own, and clear errors."""

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxkv.cache import Contiguous, Float8, Int4, Int8, Kivi, Paged, Raw, Ring
from jaxkv.cli.caches import PARTS, CacheChoice, parse_caches
from jaxkv.cli.compare_report import table
from jaxkv.cli.comparison import Result
from jaxkv.cli.generate import talk
from jaxkv.cli.main import run
from jaxkv.cli.variants import (
    SIZES,
    VARIANTS,
    count_parameters,
    make_decoder,
    matched_mlp,
)
from jaxkv.generation import Sampling


def test_a_table_of_several_seeds_fits_80_columns() -> None:
    results = [
        Result(v, 96, 115_104, [3.0951, 3.1172], [], 1536.0, {1: 12_345.6, 8: 45_678.9}, 2e-5, [])
        for v in ("mha", "mla")
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(results))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    # The deviation of 3.0951 and 3.1172 is their difference over the root of 2.
    for word in ("3.106", "± 0.016", "115,104", "1,536", "1.000", "12,346", "45,679", "2.0e-05"):
        assert text.count(word) >= 2
    assert "vs MHA" in text


@pytest.mark.parametrize("size", ["tiny", "small", "large"])
def test_parameter_totals_agree_within_one_percent(size: str) -> None:
    from flax import nnx

    sized = SIZES[size]
    target = count_parameters(nnx.eval_shape(lambda: make_decoder("mha", sized)))
    for variant in VARIANTS:
        width = matched_mlp(variant, sized, target)
        made = nnx.eval_shape(lambda v=variant, w=width: make_decoder(v, sized, mlp_features=w))
        assert abs(count_parameters(made) / target - 1) < 0.01


@pytest.fixture
def few_live_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes a text of 256 bytes instead of 1,024, which `.ci/run` does besides."""
    monkeypatch.setitem(SIZES, "tiny", dataclasses.replace(SIZES["tiny"], live=256))


@pytest.mark.usefixtures("few_live_tokens")
def test_compare_prints_measures_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["compare", "--quick", "--steps", "6", "--variants", "gqa,mla", "--output"]
    assert run([*arguments, str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for word in ("GQA", "MLA", "One seed cannot rank", "300.0 KiB", "68.6 KiB", "deepseek-v3"):
        assert word in printed
    found = json.loads((tmp_path / "compare.json").read_text())
    gqa, mla = found["variants"]
    # 2 layers x 2 KV heads x (8 + 8) x 4 bytes; 2 layers x (32 + 4) x 4 bytes.
    assert (gqa["cache_bytes_per_token"], mla["cache_bytes_per_token"]) == (256, 288)
    assert mla["cache_ratio"] == 288 / 256
    assert abs(gqa["parameters"] / mla["parameters"] - 1) < 0.01
    assert max(gqa["gap"], mla["gap"]) < 1e-4
    assert all(rate > 0 for v in (gqa, mla) for rate in v["rates"].values())
    assert [step for step, _ in gqa["curve"]] == [1, 2, 3, 4, 5, 6]
    for picture in ("loss.png", "cache.png", "real_models.png"):
        assert (tmp_path / picture).read_bytes()[:4] == b"\x89PNG"
    # Other caches are shown only to those who ask for them.
    assert "caches" not in gqa and not (tmp_path / "caches.png").exists()
    assert "other caches" not in printed


def compared(names: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Compares one variant's caches after a few steps; gives what was found of each."""
    arguments = ["compare", "--quick", "--steps", "4", "--variants", "gqa"]
    assert run([*arguments, "--cache", ",".join(names), "--output", str(folder)]) == 0
    (gqa,) = json.loads((folder / "compare.json").read_text())["variants"]
    caches = {found["cache"]: found for found in gqa["caches"]}
    assert list(caches) == ["default", *names]
    assert [step for step, _ in gqa["curve"]] == [1, 2, 3, 4] and gqa["gap"] < 1e-4
    # Four steps leave a model near knowing nothing, which is log 256 = 5.5.
    assert all(3 < found["loss"] < 6 for found in caches.values())
    assert all(set(found["rates"]) == {"1", "8"} for found in caches.values())
    assert min(rate for found in caches.values() for rate in found["rates"].values()) > 0
    return caches


@pytest.mark.usefixtures("few_live_tokens")
def test_compare_sets_caches_beside_the_default_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caches = compared(["ring:64", "paged:16+int8"], tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    words = ("other caches", "256 tokens given", "rows were 64 tokens", "caches.png", *caches)
    # With the one variant, what every comparison shows.
    words += ("GQA", "One seed cannot rank", "300.0 KiB", "68.6 KiB", "deepseek-v3")
    assert all(word in printed for word in words)
    # 2 layers x 2 KV heads = 4 records of a token, each of 8 + 8 channels; 256 tokens. A float32
    # channel is 4 bytes, an int8 one a byte, and each of key and value has a 4-byte scale.
    assert {name: found["bytes_per_token"] for name, found in caches.items()} == {
        "default": 4 * 16 * 4,
        "ring:64": 4 * 16 * 4 * 64 / 256,
        "paged:16+int8": 4 * (16 + 8),
    }
    assert [found["ratio"] for found in caches.values()] == [1, 1 / 4, 3 / 8]
    assert [found["prompt"] for found in caches.values()] == [0, 0, 0]
    # A codec rounds what it holds, and a ring forgets it.
    coded = caches["paged:16+int8"]
    assert 1e-5 < coded["gap"] < 0.1 and coded["gap"] < caches["ring:64"]["gap"]
    assert coded["loss"] == pytest.approx(caches["default"]["loss"], abs=1e-2)
    for picture in ("caches.png", "loss.png", "cache.png", "real_models.png"):
        assert (tmp_path / picture).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.full
@pytest.mark.usefixtures("few_live_tokens")
def test_compare_gives_snapkv_half_the_text_as_a_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caches = compared(["ring:64", "snapkv:64"], tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    assert "snapkv:64: given the first 128 tokens in one call" in printed
    # It compresses the prompt of 128 to 64, and keeps the 128 that follow.
    assert caches["snapkv:64"]["bytes_per_token"] == 4 * 16 * 4 * (64 + 128) / 256
    assert [found["ratio"] for found in caches.values()] == [1, 1 / 4, 3 / 4]
    assert [found["prompt"] for found in caches.values()] == [0, 0, 128]
    # The ring shows the most that forgetting can do here.
    assert 1e-5 < caches["snapkv:64"]["gap"] < 2 * caches["ring:64"]["gap"]


def test_names_of_caches_give_layout_and_codec() -> None:
    given = (
        " ring:256, PAGED:16+int4 ,int4:32+ring,sinks:60,float8,bfloat16+paged,kivi,kivi2:8+paged,"
        "contiguous+int8"
    )
    assert parse_caches(given) == {
        "ring:256": CacheChoice(Ring(256)),
        "paged:16+int4": CacheChoice(Paged(16), Int4()),
        "int4:32+ring": CacheChoice(Ring(256), Int4(32)),
        "sinks:60": CacheChoice(Ring(60, pinned=4)),
        "float8": CacheChoice(None, Float8()),
        "bfloat16+paged": CacheChoice(Paged(64), Raw("bfloat16")),
        "kivi": CacheChoice(None, Kivi()),
        "kivi2:8+paged": CacheChoice(Paged(64), Kivi(bits=2, group=8)),
        "contiguous+int8": CacheChoice(Contiguous(), Int8()),
    }
    model = make_decoder("gqa", SIZES["tiny"])
    made = parse_caches("int8")["int8"].make(model, 3, 32)
    assert (made.layouts, made.capacity, made.lengths.shape) == ((Contiguous(),), 32, (3,))
    assert made.layers[0].codec == Int8()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int8,nope", "unknown cache 'nope': want one of " + ", ".join(PARTS)),
        ("ring+", "unknown cache '': want one of"),
        ("ring:0", "cache 'ring:0': want 1 to 1048576 last tokens kept"),
        ("paged:x", "cache 'paged:x': want 1 to 1048576 tokens of a page"),
        ("int8:", "cache 'int8:': want 1 to 1048576 channels of a scale"),
        ("ring:²", "cache 'ring:²': want 1 to"),
        ("ring:9999999999", "want 1 to 1048576"),
        ("bfloat16:2", "bfloat16 takes no size"),
        ("contiguous:4", "contiguous takes no size"),
        ("ring+paged", "cache 'ring+paged': want one layout, not two"),
        ("int8+int4", "cache 'int8+int4': want one codec, not two"),
        ("int8+int8", "want one codec, not two"),
        ("ring:64+kivi", "fits Contiguous(), and Paged of a multiple of the codec's group"),
        ("int8,ring,ring:256", "want each cache once"),
        (" ,", "at least one"),
    ],
)
def test_names_that_are_no_caches_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_caches(text)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat. " * 60)
    arguments = ["train", "--size", "tiny", "--variant", "mla", "--steps", "30", "--length", "32"]
    arguments += ["--text", str(text), "--output", str(folder / "out"), "--learning-rate", "0.01"]
    assert run(arguments) == 0
    return folder / "out"


def test_train_then_generate_goes_on_with_the_text(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (trained / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 31))
    arguments = ["generate", str(trained), "--prompt", "the cat", "--tokens", "12"]
    assert run([*arguments, "--temperature", "0"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("the cat") and len(first) == len("the cat") + 12 + 1


def test_drafts_change_nothing_and_beams_print_as_much(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(trained), "--prompt", "the cat", "--tokens", "12"]
    assert run([*arguments, "--temperature", "0"]) == 0
    first = capsys.readouterr().out
    assert run([*arguments, "--temperature", "0", "--prompt-lookup", "3"]) == 0
    assert capsys.readouterr().out == first
    assert run([*arguments, "--beams", "2"]) == 0
    assert len(capsys.readouterr().out.encode()) >= len("the cat") + 12 + 1
    assert run([*arguments, "--beams", "2", "--prompt-lookup", "3"]) == 1


def test_interactive_turns_keep_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    model = make_decoder("gqa", SIZES["tiny"])
    lines = io.StringIO("ab\ncd\n\nnever read\n")
    talk(model, lines, 4, Sampling(), (), 0, capacity=64)
    said = capsys.readouterr().err
    # 3 + 3 tokens, then the pending one and 3 + 3 more.
    assert "holds 6 of 64" in said and "holds 13 of 64" in said and said.count("holds") == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compare", "--variants", "mha,nope"], "unknown variant 'nope'"),
        (["compare", "--size", "huge"], "unknown size 'huge'"),
        (["compare", "--seeds", "0"], "--seeds 0"),
        (["compare", "--dtype", "int3"], "int3"),
        (["compare", "--cache", "ring:64,nope"], "unknown cache 'nope': want one of ring, sinks"),
        (["compare", "--cache", "ring+paged"], "want one layout, not two"),
        (["compare", "--quick", "--text", "missing.txt"], "missing.txt does not exist"),
        (["train", "--variant", "nope"], "unknown variant 'nope'"),
        (["train", "--steps", "0"], "steps=0"),
        (["train", "--size", "tiny", "--implementation", "splash"], "cannot serve this call"),
        (["generate", "nowhere"], "nowhere holds no model.json"),
        (["plan", "gpt5-max"], "gpt5-max"),
        (["compare", "--quick", "--output", "a-file"], "a-file is a file: --output wants a folder"),
    ],
)
def test_user_mistakes_are_one_clear_line(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    assert run(arguments) != 0
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error
    assert error.startswith("jaxkv: ") and error.count("\n") == 1
    with pytest.raises(ValueError):
        run([*arguments, "--debug"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nosuch"], "No such command 'nosuch'"),
        (["plan", "llama3-8b", "--batch", "x"], "Input should be a valid integer"),
        (["generate"], "Missing argument 'run'"),
        (["compare", "--step", "3"], "No such option: --step"),
    ],
)
def test_command_lines_that_do_not_fit_are_one_clear_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxkv: ") and error.count("\n") == 1
    assert says in error and error.endswith("See jaxkv --help.\n")


def test_help_is_what_a_bare_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "evaluate" in capsys.readouterr().out
    assert run(["plan", "--help"]) == 0
    assert "--context" in capsys.readouterr().out


def test_a_text_that_is_too_short_says_how_long_it_must_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "short.txt"
    arguments = ["compare", "--quick", "--text", str(text), "--output", str(tmp_path)]
    text.write_text("to be")
    assert run(arguments) == 1
    assert "too short" in capsys.readouterr().err
    # Long enough to train on, too short to be decoded with 1,024 live tokens.
    text.write_text("the cat sat on the mat. " * 100)
    assert run(arguments) == 1
    error = capsys.readouterr().err
    assert "1,024 bytes are decoded of its validation part, which has 240 of its 2,400" in error
    assert "want about 10,240" in error


@pytest.fixture
def evaluation(trained: Path) -> list[str]:
    """Gives the arguments of a run of `jaxkv evaluate`."""
    text = str(trained.parent / "text.txt")
    return ["evaluate", str(trained), "--text", text, "--context", "96", "--json"]


@pytest.fixture
def evaluated(evaluation: list[str], capsys: pytest.CaptureFixture[str]) -> Callable[[str], Any]:
    """Gives what `jaxkv evaluate` finds of the default cache and of those named."""

    def call(names: str) -> Any:
        assert run([*evaluation, "--cache", names]) == 0
        found = json.loads(capsys.readouterr().out)["caches"]
        assert list(found) == ["default", *names.split(",")]
        # 144 bytes of the text are its validation part: one whole piece.
        assert {row["tokens"] for row in found.values()} == {96}
        return found

    return call


def test_evaluate_shows_what_each_cache_costs(evaluated: Callable[[str], Any]) -> None:
    found = evaluated("ring:8,int4")
    loss = {name: row["loss"] for name, row in found.items()}
    assert abs(loss["ring:8"] - loss["default"]) > 1e-5
    assert 1e-6 < abs(loss["int4"] - loss["default"]) < 0.5
    # 2 layers x (32 + 4) channels x 4 bytes; 2 x (18 bytes of codes and two scales of 4).
    assert found["default"]["bytes_per_token"] == 288 and found["int4"]["bytes_per_token"] == 52
    assert found["ring:8"]["bytes_per_token"] == 288 * 8 / 96


def test_evaluate_names_a_context_longer_than_the_text(
    evaluation: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*evaluation, "--context", "9999"]) == 1
    assert "--context 9999: want at least 10000" in capsys.readouterr().err


@pytest.mark.full
def test_evaluate_takes_pages_and_caches_that_evict(evaluated: Callable[[str], Any]) -> None:
    found = evaluated("paged:16,snapkv:24")
    loss = {name: row["loss"] for name, row in found.items()}
    assert abs(loss["paged:16"] - loss["default"]) < 1e-5
    # The second chunk of 48 bytes reads what is kept of the first.
    assert 1e-5 < abs(loss["snapkv:24"] - loss["default"]) < 1
    assert found["snapkv:24"]["bytes_per_token"] == 288 * 24 / 96


def test_a_run_goes_on_with_its_own_text_and_no_fewer_steps(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("another text, as long as it needs to be. " * 60)
    arguments = ["train", "--size", "tiny", "--variant", "mla", "--length", "32", "--resume"]
    arguments += ["--learning-rate", "0.01", "--output", str(trained)]
    assert run([*arguments, "--steps", "40", "--text", str(other)]) == 1
    assert "holds a run of another text" in capsys.readouterr().err
    same = str(trained.parent / "text.txt")
    assert run([*arguments, "--steps", "3", "--text", same]) == 1
    assert "the run is at step 30" in capsys.readouterr().err
    assert run(["train", "--size", "tiny", "--text", same, "--length", "32", "--output", same]) == 1
    assert "is a file: --output wants a folder" in capsys.readouterr().err


def test_generate_refuses_a_checkpoint_of_another_model(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    other = tmp_path / "other"
    shutil.copytree(trained, other)
    note = json.loads((other / "model.json").read_text())
    (other / "model.json").write_text(json.dumps(note | {"variant": "gqa"}))
    assert run(["generate", str(other)]) == 1
    assert "another model" in capsys.readouterr().err
