"""`jaxllm prepare` and `info`: bundles made and described, and the memory they take."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxllm.serving.ground.bundles
from jaxllm.bundle import Bundle
from jaxllm.bundle.layout import ALIGN
from jaxllm.models.parameters import parameter_count
from tests.cli.outcome import CFG, PARAMS, Run, answer, edit_config, failed, succeeded
from tests.tiny import tiny_params, write_tiny_bundle, write_tiny_folder


def test_prepare_at_another_width_and_without_a_key(run: Run, folder: Path, tmp_path: Path) -> None:
    edit_config(folder, brand_new=1)
    out = tmp_path / "m.jaxllm"
    failed(run("prepare", folder, "-o", out), "brand_new")
    assert not out.exists()
    prepared = run("prepare", folder, "-o", out, "--weights", "int4", "--ignore-config-key", "brand_new")
    assert "int4 weights" in succeeded(prepared)
    with Bundle.open(out) as made:
        assert made.layout.weights == "int4"
        made.verify()


def test_info(run: Run, bundle: Path) -> None:
    facts = answer(run("info", bundle, "--json", "--verify"))
    with Bundle.open(bundle) as opened:
        expected = {
            "model": "tiny", "weights": "f32", "parameters": parameter_count(CFG),
            "file_bytes": bundle.stat().st_size, "fingerprint": opened.fingerprint, "verified": True,
            "config": json.loads(json.dumps(CFG.to_json())),
        }  # fmt: skip
    assert {key: facts[key] for key in expected} == expected
    assert {"jaxllm", "jax", "device", "kernels", "kernels_reason", "kernel_threads"} < set(facts)
    assert set(facts["kernels_available"]) <= set(facts["kernels_built"])
    assert not set(facts["kernels_left_out"]) & set(facts["kernels_built"])
    lines = succeeded(run("info", bundle)).splitlines()
    # One whole fact a line, however wide the terminal.
    shown = dict(line.split(maxsplit=1) for line in lines)
    assert shown["fingerprint"] == expected["fingerprint"]
    assert (shown["verified"], shown["hidden_size"]) == ("False", "64")


def test_info_of_odd_names_and_of_the_packaged_model(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "default.jaxllm"
    monkeypatch.setattr(jaxllm.serving.ground.bundles, "default_bundle", lambda: path)
    failed(run("info"), "default.jaxllm", "No such file")
    for name in ("[red]x", "\x1b[31m", "a\nb", "é 世"):
        write_tiny_bundle(path, cfg=CFG, params=PARAMS, name=name)
        shown = name.replace("\x1b", "?").replace("\n", "?")
        assert succeeded(run("info")).splitlines()[0].split(maxsplit=1)[1] == shown


def least_memory(run: Run, model: Path) -> int:
    """What a start with too little memory says that it needs, in bytes."""
    too_small = run("generate", "--model", model, "--memory", "1", "--prompt", "a")
    failed(too_small, "needs at least")
    return int(re.search(r"at least ([\d,]+)", too_small.err)[1].replace(",", ""))


def test_info_of_a_folder(run: Run, folder: Path) -> None:
    facts = answer(run("info", folder, "--json"))
    assert (facts["family"], facts["stored"], facts["weights"]) == (CFG.model_type, "floats", "f32")
    assert facts["parameters"] == parameter_count(CFG)
    assert facts["rooms"]["levels"] == "yes"
    assert "no mixture" in facts["rooms"]["separate experts"]
    assert 0 <= facts["memory_bytes"]["f32"]["weights"] - 4 * parameter_count(CFG) <= ALIGN * len(PARAMS)
    assert facts["memory_bytes"]["int4"]["weights"] < facts["memory_bytes"]["int8"]["weights"]
    memory = facts["memory_bytes"]["f32"]
    assert memory["weights"] < memory["--memory for all"]
    # Both are of the same kind as what a start says: enough, and not much more than that.
    least = least_memory(run, folder)
    assert least * 0.9 < memory["least --memory"] < least * 1.1
    assert "rooms: levels" in succeeded(run("info", folder))
    failed(run("info", folder, "--verify"), "no checksums")


def test_info_of_a_mixture(run: Run, tmp_path: Path) -> None:
    cfg = dataclasses.replace(CFG, model_type="mixtral", experts=8, experts_per_token=2, attention_windows=())
    folder = write_tiny_folder(tmp_path / "model", cfg=cfg, params=tiny_params(cfg))
    facts = answer(run("info", folder, "--json"))
    apart = tmp_path / "apart.jaxllm"
    succeeded(run("prepare", folder, "-o", apart, "--weights", "int8", "--expert-bits", "8"))
    least = least_memory(run, apart)
    said = facts["memory_bytes"]["int8"]["least --memory, separate experts"]
    assert least * 0.9 < said < least * 1.1


def test_info_recognizes_a_grid_of_four_bits(run: Run, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    grid = {
        name: (np.clip(np.rint(draw.normal(size=each.shape) * 2.6), -8, 7) * 0.01).astype(np.float32)
        for name, each in PARAMS.items()
    }
    folder = write_tiny_folder(tmp_path / "qat", cfg=CFG, params=grid)
    assert "on a grid of 4 bits" in answer(run("info", folder, "--json"))["stored"]


def test_info_and_prepare_of_a_gguf_file(run: Run, tmp_path: Path) -> None:
    from tests.checkpoints.gguf_files import config_keys, gguf_tensors, tokenizer_keys, write_file

    keys = {**config_keys(CFG), **tokenizer_keys(tmp_path, CFG.vocab_size)}
    path = write_file(tmp_path / "m.gguf", "llama", keys, gguf_tensors(CFG, PARAMS), "Q8_0")
    facts = answer(run("info", path, "--json"))
    assert (facts["family"], facts["weights"]) == ("llama", "int8")
    assert "Q8_0" in facts["stored"]
    assert "int8 weights" in succeeded(run("prepare", path, "-o", tmp_path / "m.jaxllm"))
    path.write_bytes(path.read_bytes()[:5000])
    failed(run("prepare", path, "-o", tmp_path / "other.jaxllm"), "truncated")


MEGABYTE = 1_000_000
# With room for other systems: measured were 87 MB, 9 MB and 20 MB.
MOST_ANONYMOUS, MOST_OF_BUCKETS, MOST_OF_LIBRARIES = 125 * MEGABYTE, 25 * MEGABYTE, 60 * MEGABYTE


def started(cache: Path) -> dict:
    # Not with the suite's own cache of what JAX compiles, from which no bucket is kept.
    suite = ("JAXLLM_BUCKETS_BYTES", "JAX_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(suite)}
    environment = {**kept, "JAXLLM_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "jaxllm.cli.entry", "info", "--memory", "--json"],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_start_holds_little_memory(tmp_path: Path) -> None:
    compiled, read = started(tmp_path), started(tmp_path)
    assert compiled["compiled_buckets"] == read["loaded_buckets"] > 0
    assert compiled["loaded_buckets"] == read["compiled_buckets"] == 0
    for facts in (compiled, read):
        assert sum(facts["anonymous"].values()) == facts["anonymous_bytes"]
        assert min(facts["weights_bytes"], facts["cache_bytes"]) > MEGABYTE
        parts = facts["anonymous_bytes"] + facts["weights_bytes"] + facts["libraries_bytes"]
        assert parts == facts["resident_bytes"] <= facts["peak_bytes"]
        assert sum(facts["pages"].values()) == facts["anonymous_bytes"] < MOST_ANONYMOUS
        # Of the first start, too: buckets are compiled in another process.
        assert facts["anonymous"]["buckets"] < MOST_OF_BUCKETS
        assert facts["libraries_bytes"] < MOST_OF_LIBRARIES


def test_what_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = run("info", "--memory", "--verify")
    assert done.code == 2
    assert "give --verify or --memory, not both" in done.err
    monkeypatch.setattr("jaxllm.serving.host.process_memory._SMAPS", tmp_path / "smaps")
    failed(run("info", "--memory"), "Linux alone")
