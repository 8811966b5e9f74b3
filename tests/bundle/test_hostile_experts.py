"""Bundles of mixtures whose manifests were forged: refused with a message, never read out of bounds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import expert_parts, read_path_counts, read_token_experts
from jaxllm.experts.prediction import PathCounts, TokenExperts
from tests.bundle.forging import (
    MIXED,
    forge,
    manifest_of,
    open_only,
    refused,
    write,
)

Manifest = dict[str, Any]


_EXPERT = "layers.1.experts.0.gate"


def _expert(**change: Any) -> Callable[[Manifest], None]:
    return lambda m: m["tensors"][_EXPERT].update(change)


def _counts(name: str, **change: Any) -> Callable[[Manifest], None]:
    return lambda m: m["parts"]["experts"]["tensors"][name]["data"].update(change)


HOSTILE_EXPERTS: dict[str, tuple[str, Callable[[Manifest], Any]]] = {
    "in its neighbour's segment": ("outside its segment", _expert(segment="layers.1.experts.1")),
    "in its layer's segment": ("outside its segment", _expert(segment="layers.1")),
    "where its neighbour is": (
        "outside its segment",
        lambda m: m["tensors"][_EXPERT].update(
            {each: m["tensors"]["layers.1.experts.1.gate"][each] for each in ("data", "scale", "bits")}
        ),
    ),
    "at its neighbour's width": ("quantized in a way", _expert(bits=4)),
    "at a width that there is not": ("quantized in a way", _expert(bits=3)),
    "missing": ("parameters do not match", lambda m: m["tensors"].pop(_EXPERT)),
    "one too many": (
        "parameters do not match",
        lambda m: m["tensors"].update({"layers.1.experts.3.gate": m["tensors"][_EXPERT]}),
    ),
    "more than the router knows": ("do not match", lambda m: m["model"].update(experts=4)),
    "without a segment": (
        "outside its segment",
        lambda m: m.update(segments=[each for each in m["segments"] if each["name"] != "layers.1.experts.0"]),
    ),
    "all together": ("parameters do not match", lambda m: m.update(experts_apart=False)),
    "apart by a number": ("experts_apart is 1", lambda m: m.update(experts_apart=1)),
    "counts beyond their segment": ("outside its segment", _counts("alone", shape=[1, 1 << 40])),
    "counts of a type that there is not": ("not one a bundle may hold", _counts("pairs", dtype="int128")),
}


@pytest.mark.parametrize(("part", "edit"), HOSTILE_EXPERTS.values(), ids=HOSTILE_EXPERTS)
def test_hostile_experts_are_refused(tmp_path: Path, part: str, edit: Callable[[Manifest], Any]) -> None:
    path = write_mixture(tmp_path)
    manifest = manifest_of(path)
    edit(manifest)
    refused(forge(path, manifest), part, when=open_only)


def test_experts_apart_in_a_model_without_any(micro_file: Path) -> None:
    manifest = manifest_of(micro_file)
    manifest["experts_apart"] = True
    refused(forge(micro_file, manifest), "experts_apart is True in a model of 0", when=open_only)


def write_mixture(folder: Path) -> Path:
    """A mixture whose three experts have widths of their own, and counts of one layer's visits."""
    counts = PathCounts(
        np.ones((1, 3), np.float32),
        np.zeros((1, 3, 3), np.float32),
        np.full((1, 0), -1, np.int32),
        np.zeros((1, 0, 3), np.float32),
    )
    tokens = TokenExperts(np.array([1, 2], np.int32), np.zeros((1, 2, MIXED.experts_per_token), np.uint8))
    bits, parts = np.array([[8, 4, 2]]), expert_parts(counts, tokens=tokens)
    return write(folder / "mixture.jaxllm", "int8", MIXED, expert_bits=bits, parts=parts)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("alone", [3, 1]),
        ("alone", [3]),
        ("after_one", [1, 9]),
        ("pairs", [0]),
        ("tokens", [1]),
        ("token_experts", [2, 1]),
    ],
)
def test_counts_of_another_model_are_refused(tmp_path: Path, name: str, shape: list[int]) -> None:
    path = write_mixture(tmp_path)
    with Bundle.open(path) as bundle:
        assert read_path_counts(bundle).alone.tolist() == [[1.0, 1.0, 1.0]]
        assert read_token_experts(bundle).tokens.tolist() == [1, 2]
    manifest = manifest_of(path)
    _counts(name, shape=shape)(manifest)

    def read(path: Path) -> None:
        with Bundle.open(path) as bundle:
            read_path_counts(bundle)
            read_token_experts(bundle)

    refused(forge(path, manifest), "make it again with `jaxllm calibrate experts`", when=read)
