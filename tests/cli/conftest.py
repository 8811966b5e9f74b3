"""Runs commands in this process, on tiny models that are made once and compiled once."""

import io
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxllm.cli.main import main
from jaxllm.serving.buckets.bucket import ModelShapes
from jaxllm.serving.buckets.bucket_table import BucketTable
from tests.cli.outcome import CFG, PARAMS, Outcome, Run
from tests.serving.conftest import tiny_bundle
from tests.tiny import tiny_tokenizer, write_tiny_bundle, write_tiny_folder

__all__ = ["tiny_bundle"]
BUILT: dict[Any, Any] = {}


class Typed(io.TextIOWrapper):
    """Standard input from a pipe that holds the given bytes."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw), encoding="utf-8")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `jaxllm` with arguments and standard input."""

    def run(*arguments: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", Typed(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Outcome(caught.value.code, out, err)

    return run


@pytest.fixture(autouse=True)
def compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is a function of shapes alone: engines of one shape share what the first compiled."""
    build = BucketTable._build

    def remembered(table: BucketTable, bucket: Any) -> Any:
        model, _ = table._models[bucket.level]
        if not isinstance(model, ModelShapes):
            return build(table, bucket)
        leaves, structure = jax.tree.flatten(model.params)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (model.cfg, model.options, bucket, structure, shapes)
        if key not in BUILT:
            BUILT[key] = build(table, bucket)
        return BUILT[key]

    monkeypatch.setattr(BucketTable, "_build", remembered)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models to read: a bundle that chats, one that does not, and a folder."""
    home = tmp_path_factory.mktemp("models")
    write_tiny_bundle(home / "tiny.jaxllm", cfg=CFG, params=PARAMS)
    base = tiny_tokenizer(chat=False)
    write_tiny_bundle(home / "base.jaxllm", cfg=CFG, params=PARAMS, tokenizer=base, name="base")
    write_tiny_folder(home / "folder", cfg=CFG, params=PARAMS)
    return home


@pytest.fixture(scope="module")
def bundle(home: Path) -> Path:
    return home / "tiny.jaxllm"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to damage."""
    return write_tiny_folder(tmp_path / "model", cfg=CFG, params=PARAMS)
