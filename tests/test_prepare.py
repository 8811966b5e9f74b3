"""From a Hugging Face folder to a bundle: the same parameters, in the checkpoint's own width."""

import dataclasses
import itertools
import json
import tracemalloc
from collections.abc import Callable
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
from jaxllm.files import input_files
from jaxllm.models.parameters import param_specs, parameter_count
from jaxllm.prepare import prepare
from jaxllm.quant import Bfloat16Bits, dequantize
from jaxllm.quant import weights as quant_weights
from jaxllm.serving.ground.bundles import open_model
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


@pytest.mark.parametrize("start", [lambda folder: prepare(folder, folder.parent / "out"), open_model])
def test_the_config_is_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[Path], Any]
) -> None:
    """Whether a bundle is prepared from a folder, or an engine opens the folder itself."""
    opened: list[str] = []
    really = input_files.open_regular

    def counted(path: Path) -> Any:
        opened.append(Path(path).name)
        return really(path)

    monkeypatch.setattr(input_files, "open_regular", counted)
    start(folder)
    assert opened.count("config.json") == 1


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "int4", "int4-all"])
def test_a_prepared_folder_is_the_bundle_of_its_parameters(
    tmp_path: Path, folder: Path, weights: Any
) -> None:
    prepare(folder, tmp_path / "out", weights=weights)
    direct = write_tiny_bundle(tmp_path / "direct", weights, params=random_params(TINY), name="model")
    assert (tmp_path / "out").read_bytes() == direct.read_bytes()


@pytest.mark.parametrize("weights", ["f32", "int4"])
def test_progress_grows_to_the_end(tmp_path: Path, folder: Path, weights: Any) -> None:
    calls: list[tuple[str, int, int]] = []
    prepare(folder, tmp_path / "out", weights=weights, progress=lambda *call: calls.append(call))
    stages, done, totals = zip(*calls, strict=True)
    assert set(stages) == {"prepare"}
    assert set(totals) == {parameter_count(TINY)}
    assert len(calls) == len(random_params(TINY))
    assert all(a < b for a, b in itertools.pairwise(done))
    assert done[0] > 0
    assert done[-1] == totals[0]


def test_folder_names(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is the folder's even when it is given as "." or through a link, or holds odd letters."""
    (tmp_path / "link").symlink_to(folder)
    odd = typed_folder(tmp_path / "mod\udcffel\n[v2]", np.float32)
    monkeypatch.chdir(folder)
    for given, name in ((Path(), "model"), (tmp_path / "link", "model"), (odd, "mod?el?[v2]")):
        prepare(given, tmp_path / "out")
        with Bundle.open(tmp_path / "out") as bundle:
            assert bundle.layout.name == name


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
    "another vocabulary": ("BF16 of shape [300, 64]", lambda f: edit_config(f, vocab_size=300)),
    "more layers": ("lacks", lambda f: edit_config(f, num_hidden_layers=3)),
    "unknown model": ("model_type 'llama9' is not supported", lambda f: edit_config(f, model_type="llama9")),
    "no config": ("config.json is missing", lambda f: (f / "config.json").unlink()),
    "no tokenizer": ("tokenizer.json", lambda f: (f / "tokenizer.json").unlink()),
    "cut weights": ("truncated or corrupt", cut_weights),
    "tensor missing": ("lm_head.weight", lambda f: edit_tensors(f, **{"lm_head.weight": None})),
    "tensor too many": ("spare", lambda f: edit_tensors(f, spare=np.zeros(3, np.float32))),
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
    with pytest.raises(CheckpointError, match="no such folder"):
        prepare(folder, folder / "config.json" / "out")
    with pytest.raises(CheckpointError, match=r"absent/config\.json is missing"):
        prepare(tmp_path / "absent", tmp_path / "out")
    assert names(tmp_path) == ["dir", "model"]
    assert names(tmp_path / "dir") == []


def test_experts_apart(tmp_path: Path, folder: Path) -> None:
    """Each expert in a segment of its own, at the width that was asked for; all else as it is."""
    cfg = dataclasses.replace(
        TINY, model_type="mixtral", attention_windows=(), experts=3, experts_per_token=2, sparse_layers=()
    )
    params = random_params(cfg)
    mixture, out = write_tiny_folder(tmp_path / "mixture", cfg=cfg, params=params), tmp_path / "out.jaxllm"
    bits = np.array([[2, 4, 8], [8, 16, 32]])
    prepare(mixture, out, expert_bits=bits)
    with Bundle.open(out) as bundle:
        bundle.verify()
        for layer, expert in np.ndindex(2, 3):
            segment = bundle.layout.segments[f"layers.{layer}.experts.{expert}"]
            assert segment.offset % 4096 == 0
            own = bundle.layout.by_segment[segment.name]
            assert [name.rsplit(".", 1)[1] for name in own] == ["gate", "up", "down"]
            width = int(bits[layer, expert])
            assert {each.bits for each in own.values()} == {width if width < 16 else 0}
        loaded, hot = bundle.load(), bundle.load_all_but_experts()
        assert set(hot) == {name for name in loaded if ".experts." not in name}
        np.testing.assert_array_equal(loaded["layers.0.router"], params["layers.0.router"])
        exact = dequantize(loaded["layers.1.experts.up"], np.dtype(np.float32))[2]
        np.testing.assert_array_equal(exact, params["layers.1.experts.up"][2])
        both = dequantize(loaded["layers.0.experts.gate"], np.dtype(np.float32))
        for expert, most in enumerate((0.4, 0.1, 0.01)):
            wanted = params["layers.0.experts.gate"][expert]
            assert np.sqrt(np.mean((both[expert] - wanted) ** 2)) < most * np.std(wanted)


def test_experts_that_cannot_be_apart(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="no mixture of experts"):
        prepare(folder, tmp_path / "out.jaxllm", expert_bits=4)
    assert not (tmp_path / "out.jaxllm").exists()


@pytest.mark.parametrize(
    ("source", "bad", "weights"),
    [
        ("f32", np.nan, None), ("f32", -np.inf, "f32"), ("f32", np.inf, "bf16"), ("bf16", np.nan, "bf16"),
        ("bf16", np.inf, "int8"), ("f16", -np.inf, "int4"), ("f16", np.nan, "f32"),
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


def test_weights_beyond_their_width_are_refused_by_name(tmp_path: Path) -> None:
    largest = float(np.finfo(np.float32).max)
    params = random_params(TINY)
    params["layers.1.ffn.up"][3, 3] = largest
    write_tiny_bundle(tmp_path / "wide.jaxllm", "f32", params=params)
    for weights in ("bf16", "int4"):
        with (
            np.errstate(over="ignore"),
            pytest.raises(ConfigError, match=r"parameter layers\.1\.ffn\.up: (it holds|weights above)"),
        ):
            write_tiny_bundle(tmp_path / "narrow.jaxllm", weights, params=params)


# Large embeddings: in parts


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "int8-nested", "int4", "int4-all", "int4-min"])
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
