"""Tests that a bundle gives back what was written into it, from the right places of the file."""

import dataclasses
import gc
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxllm.bundle import WEIGHT_FORMATS, Bundle, WeightFormat, segment_of
from jaxllm.bundle.layout import ALIGN, HEADER, PAGE
from jaxllm.config import ModelConfig
from jaxllm.errors import BundleError
from jaxllm.models import parameters
from jaxllm.quant import Bfloat16Bits, quantize, to_blocks
from tests.bundle.forging import CONFIGS, MICRO, every_config, every_format, params_of, same_bits, write
from tests.kernels.switching import NATIVE
from tests.tiny import TINY, tiny_tokenizer


@pytest.mark.parametrize(
    ("cfg", "source"),
    [*((cfg, np.float32) for cfg in CONFIGS.values()), (MICRO, ml_dtypes.bfloat16), (MICRO, np.float16)],
)
def test_f32_comes_back_bit_for_bit(tmp_path: Path, cfg: ModelConfig, source: Any) -> None:
    """And every narrower type widens exactly."""
    params = {name: value.astype(source) for name, value in params_of(cfg).items()}
    with Bundle.open(write(tmp_path / "m", "f32", cfg, params=params)) as bundle:
        loaded = bundle.load()
    assert list(loaded) == list(parameters.param_specs(cfg))
    for name, value in params.items():
        assert same_bits(loaded[name], value.astype(np.float32)), name


@every_config
def test_bf16_comes_back_bit_for_bit_with_float32_vectors(tmp_path: Path, cfg: ModelConfig) -> None:
    rounded = {name: value.astype(ml_dtypes.bfloat16) for name, value in params_of(cfg).items()}
    with Bundle.open(write(tmp_path / "m", "bf16", cfg, params=rounded)) as bundle:
        for name, value in bundle.load().items():
            if parameters.param_specs(cfg)[name].role == "vector":
                assert same_bits(value, rounded[name].astype(np.float32)), name
            else:
                assert isinstance(value, Bfloat16Bits)
                assert same_bits(value.bits, rounded[name].view(np.uint16)), name


@pytest.mark.parametrize("weights", ["int8", "int4", "int4-all"])
@every_config
def test_integers_are_those_of_quantize(
    tmp_path: Path, cfg: ModelConfig, weights: WeightFormat, kernels: str
) -> None:
    """Matrices along the axis their product contracts, in the order of whoever will read them; tables, keys
    and values at 8 bits unless all are to be narrow; vectors as they are."""
    with Bundle.open(write(tmp_path / "m", weights, cfg)) as bundle:
        loaded = bundle.load()
    bits_seen = set()
    for name, value in params_of(cfg).items():
        got = loaded[name]
        if value.ndim == 1 or name.endswith(("bias", "positions", "router")):
            assert same_bits(got, value), name
            continue
        wide = name in ("embed.tokens", "head") or name.endswith((".attn.k", ".attn.v"))
        bits = {"int8": 8, "int4": 8 if wide else 4, "int4-all": 4}[weights]
        axis = -2 if name.endswith((".o", ".down")) else -1
        expected = quantize(value, bits=bits, axis=axis, minima=weights == "int4" and bits == 4)
        if kernels == "native":
            expected = to_blocks(expected)
        assert type(got) is type(expected), name
        for field in dataclasses.fields(expected):
            ours, theirs = (getattr(each, field.name) for each in (got, expected))
            assert same_bits(ours, theirs), (name, field.name)
        bits_seen.add(bits)
    assert bits_seen == {"int8": {8}, "int4": {4, 8}, "int4-all": {4}}[weights]


@every_config
def test_the_rest_comes_back(tmp_path: Path, cfg: ModelConfig) -> None:
    files = tiny_tokenizer(chat=False)
    path = write(tmp_path / "m", "int8", cfg, tokenizer=files, name="my model é")
    with Bundle.open(path) as bundle:
        assert bundle.cfg == cfg
        assert bundle.tokenizer_files() == files
        assert (bundle.layout.name, bundle.layout.weights) == ("my model é", "int8")
        assert bundle.weight_bytes == sum(tensor.size_bytes for tensor in bundle.layout.tensors.values())
        seen: list[tuple[str, int]] = []
        bundle.load(on_segment=lambda name, size: seen.append((name, size)))
        assert seen == [(name, each.size_bytes) for name, each in bundle.layout.segments.items()][1:]
        if NATIVE:
            assert bundle.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(bundle.load()))


@pytest.mark.parametrize(
    ("cfg", "weights"),
    [(list(CONFIGS.values())[at % len(CONFIGS)], weights) for at, weights in enumerate(WEIGHT_FORMATS)],
)
def test_places(tmp_path: Path, cfg: ModelConfig, weights: WeightFormat) -> None:
    """Segments in the order in which a step reads them, tensors in order inside, all aligned."""
    path = write(tmp_path / "m", weights, cfg)
    with Bundle.open(path) as bundle:
        layout = bundle.layout
    planes = ("", ".low") if weights == "int8-nested" else ("",)
    places = ["embed", *(f"layers.{layer}" for layer in range(cfg.layers)), "final"]
    named = [f"{place}{plane}" for place in places for plane in planes]
    # A tied head has its planes with the embedding.
    wanted = ["tokenizer", *named[: -1 if cfg.tied_head and len(planes) > 1 else None]]
    assert list(layout.segments) == wanted
    end = HEADER.size
    for segment in layout.segments.values():
        assert segment.offset % PAGE == 0
        assert 0 <= segment.offset - end < PAGE
        end = segment.offset + segment.size_bytes
    at = {name: segment.offset for name, segment in layout.segments.items()}
    assert list(layout.tensors) == list(parameters.param_specs(cfg))
    for name, tensor in layout.tensors.items():
        assert tensor.segment == segment_of(name)
        for extent in tensor.extents:
            segment = tensor.segments[-1] if extent is tensor.low else tensor.segment
            assert extent.offset % ALIGN == 0
            assert 0 <= extent.offset - at[segment] < ALIGN
            at[segment] = extent.offset + extent.size_bytes
    for name, segment in layout.segments.items():
        # Weights fill their segments to the last byte; the tokenizer has no tensors.
        end = at[name] if name != "tokenizer" else segment.offset + segment.size_bytes
        assert end == segment.offset + segment.size_bytes


@every_format
def test_arrays_are_the_mapped_file(tmp_path: Path, weights: WeightFormat) -> None:
    """Loading copies nothing: all pointers differ from their offsets in the file by one number."""
    if weights not in ("f32", "bf16") and not NATIVE:
        pytest.skip("without native kernels narrow weights are put into another order")
    with Bundle.open(write(tmp_path / "m", weights)) as bundle:
        bases = set()
        for name, value in bundle.load().items():
            tensor = bundle.layout.tensors[name]
            leaves = jax.tree.leaves(value)
            assert len(leaves) == len(tensor.extents)
            for leaf, extent in zip(leaves, tensor.extents, strict=True):
                bases.add(leaf.unsafe_buffer_pointer() - extent.offset)
    assert len(bases) == 1


def test_arrays_outlive_the_bundle_and_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m")
    bundle = Bundle.open(path)
    loaded = bundle.load()
    bundle.close()
    with pytest.raises(BundleError, match="closed"):
        bundle.load()
    with pytest.raises(BundleError, match="closed"):
        bundle.verify()
    del bundle
    # Prepared again at the same path, then removed: those who have it open keep what they opened.
    write(path, params={name: value + 1 for name, value in params_of(TINY).items()})
    path.unlink()
    gc.collect()
    for name, value in params_of(TINY).items():
        assert same_bits(loaded[name], value), name


@every_format
def test_the_same_model_makes_the_same_bytes(tmp_path: Path, weights: WeightFormat) -> None:
    paths = [write(tmp_path / name, weights) for name in "ab"]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert Bundle.open(paths[0]).fingerprint == Bundle.open(paths[1]).fingerprint
