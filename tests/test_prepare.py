"""From a Hugging Face folder to a bundle: the same parameters, in the checkpoint's own width."""

import dataclasses
import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.bundle import Bundle
from jaxllm.checkpoints import safetensors_folder
from jaxllm.checkpoints.huggingface import Checkpoint, read_config, read_params
from jaxllm.errors import CheckpointError, ConfigError, JaxllmError
from jaxllm.models.input_squares import with_input_squares
from jaxllm.models.parameters import param_specs
from jaxllm.prepare import _text_tokens, prepare
from jaxllm.quant import Bfloat16Bits
from jaxllm.quant import weights as quant_weights
from tests.checkpoints.memory import mapped_bytes, traced
from tests.tiny import TINY, random_params, tiny_tokenizer, write_tiny_bundle, write_tiny_folder

TYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def typed_folder(path: Path, dtype: Any) -> Path:
    params = {name: value.astype(dtype) for name, value in random_params(TINY).items()}
    return write_tiny_folder(path, params=params)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return typed_folder(tmp_path / "model", np.float32)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("source", TYPES)
def test_parameters_are_those_of_the_folder(tmp_path: Path, source: str) -> None:
    """Nothing is lost whatever the checkpoint's type; float16 has no form of its own."""
    folder = typed_folder(tmp_path / "model", TYPES[source])
    out = tmp_path / "out.jaxllm"
    prepare(folder, out)
    with Bundle.open(out) as bundle:
        assert bundle.layout.weights == ("bf16" if source == "bf16" else "f32")
        assert bundle.layout.weights == Checkpoint(folder).weight_format
        assert bundle.layout.name == "model"
        assert bundle.cfg == read_config(folder) == TINY
        assert bundle.tokenizer_files() == tiny_tokenizer()
        loaded = bundle.load()
    expected = dict(read_params(folder, TINY))
    assert list(loaded) == list(expected)
    for name, value in loaded.items():
        if isinstance(value, Bfloat16Bits):
            np.testing.assert_array_equal(value.bits, expected[name].view(np.uint16))
        else:
            np.testing.assert_array_equal(value, expected[name].astype(np.float32), strict=True)


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "int4", "int4-all"])
def test_a_prepared_folder_is_the_bundle_of_its_parameters(
    tmp_path: Path, folder: Path, weights: Any
) -> None:
    prepare(folder, tmp_path / "out", weights=weights)
    params = random_params(TINY)
    if weights.startswith("int4"):
        # Of 4 bits also by the inputs on the text.
        tokens, _ = _text_tokens(tiny_tokenizer(), TINY, ())
        in_order = [(name, params[name]) for name in param_specs(TINY)]
        params = dict(with_input_squares(in_order, TINY, tokens))
    direct = write_tiny_bundle(tmp_path / "direct", weights, params=params, name="model")
    assert (tmp_path / "out").read_bytes() == direct.read_bytes()


def test_an_unknown_key_can_be_ignored(tmp_path: Path, folder: Path) -> None:
    edit_config(folder, brand_new_key=0.5)
    with pytest.raises(ConfigError, match="brand_new_key"):
        prepare(folder, tmp_path / "out")
    assert names(tmp_path) == ["model"]
    prepare(folder, tmp_path / "out", ignore_keys=["brand_new_key"])
    with Bundle.open(tmp_path / "out") as bundle:
        assert bundle.cfg == TINY


def edit_config(folder: Path, **change: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def edit_tensors(folder: Path, **change: np.ndarray | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path) | change
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


# One of each kind: `tests/checkpoints` has the others.
DAMAGE: dict[str, tuple[str, Any]] = {
    "more layers": ("lacks", lambda f: edit_config(f, num_hidden_layers=3)),
    "unknown model": ("model_type 'llama9' is not supported", lambda f: edit_config(f, model_type="llama9")),
    "no config": ("config.json is missing", lambda f: (f / "config.json").unlink()),
    "cut weights": ("truncated or corrupt", cut_weights),
    "tensor missing": ("lm_head.weight", lambda f: edit_tensors(f, **{"lm_head.weight": None})),
    "integer tensor": ("I32", lambda f: edit_tensors(f, **{"model.norm.weight": np.zeros(64, np.int32)})),
}


@pytest.mark.parametrize(("part", "damage"), DAMAGE.values(), ids=DAMAGE)
def test_folders_that_do_not_fit_together(tmp_path: Path, folder: Path, part: str, damage: Any) -> None:
    """One line that names the trouble; neither the bundle nor a piece of it is left."""
    damage(folder)
    with pytest.raises(JaxllmError) as caught:
        prepare(folder, tmp_path / "out")
    message = str(caught.value)
    assert part in message
    assert "\n" not in message
    assert names(tmp_path) == ["model"]


def test_places_that_cannot_take_a_bundle(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "dir").mkdir()
    with pytest.raises(
        CheckpointError, match=r"dir is a folder; name the bundle's file, such as .*model\.jaxllm"
    ):
        prepare(folder, tmp_path / "dir")
    with pytest.raises(CheckpointError, match="absent: no such folder; create it first"):
        prepare(folder, tmp_path / "absent" / "out")
    assert names(tmp_path) == ["dir", "model"]
    assert names(tmp_path / "dir") == []


@pytest.mark.parametrize(
    ("source", "bad", "weights"),
    [
        ("f32", np.nan, None), ("f32", np.inf, "bf16"), ("bf16", np.inf, "int8"), ("f16", -np.inf, "int4"),
    ],
)  # fmt: skip
def test_weights_that_are_no_numbers_are_refused_by_name(
    tmp_path: Path, source: str, bad: float, weights: Any
) -> None:
    """One value, in the middle of the last matrix that is read or of a norm."""
    for stored in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        folder = typed_folder(tmp_path / "model", TYPES[source])
        tensors = load_file(folder / "model.safetensors")
        tensors[stored].reshape(-1)[7] = bad
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"tensor {stored} of .* holds NaN or infinite values"):
            prepare(folder, tmp_path / "out.jaxllm", weights=weights)
        assert not (tmp_path / "out.jaxllm").exists()


# Large embeddings: in parts


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "int8-nested", "int4", "int4-all"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_matrix_in_parts_is_stored_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Any, tied: bool
) -> None:
    """Byte for byte, with a last part of no whole panel."""
    cfg = dataclasses.replace(TINY, vocab_size=61, tied_head=tied)
    folder = write_tiny_folder(tmp_path / "model", cfg=cfg, params=random_params(cfg))
    prepare(folder, tmp_path / "whole.jaxllm", weights=weights)
    monkeypatch.setattr(quant_weights, "PART_NUMBERS", 16 * cfg.hidden_size)
    assert len(list(quant_weights.part_rows(61, cfg.hidden_size))) == 4
    prepare(folder, tmp_path / "parts.jaxllm", weights=weights)
    assert (tmp_path / "parts.jaxllm").read_bytes() == (tmp_path / "whole.jaxllm").read_bytes()


@pytest.mark.parametrize("weights", ["bf16", "int4-all"])
def test_preparing_takes_a_part_of_a_large_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Any
) -> None:
    """In memory of Python and NumPy, and in pages of the file that stay mapped."""
    monkeypatch.setattr(quant_weights, "PART_NUMBERS", 1 << 18)
    monkeypatch.setattr(safetensors_folder, "_MOST_MAPPED_BYTES", 1 << 20)
    cfg = dataclasses.replace(TINY, vocab_size=1 << 15, hidden_size=128)
    draw = np.random.default_rng(0)
    shapes = {name: spec.shape for name, spec in param_specs(cfg).items()}
    params = {
        name: draw.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    folder = write_tiny_folder(tmp_path / "model", cfg=cfg, params=params)
    file = folder / "model.safetensors"
    seen, parts = [], itertools.count()

    def watch(*_: Any) -> None:
        # Not after every part: in a process of many mappings that takes long, and what stays mapped adds up.
        if next(parts) % 4 == 3:
            seen.append(mapped_bytes(file))

    with traced():
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        prepare(folder, tmp_path / "m.jaxllm", weights=weights, progress=watch)
        peak = tracemalloc.get_traced_memory()[1] - before
    assert peak < file.stat().st_size
    if seen[0] is not None:
        assert max(seen) < 4 << 20 < file.stat().st_size / 2
