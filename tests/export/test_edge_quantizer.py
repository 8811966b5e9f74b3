"""The peer that quantizes our float TFLite model: the same programs, at 8 bits."""

import shutil

import pytest

from benchmarks.export.run import quantize_folder
from benchmarks.harness.children import Export
from jaxllm.errors import JaxllmError
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.programs.model import open_program
from tests.export.models import answers

pytest.importorskip("ai_edge_quantizer")
pytest.importorskip("ai_edge_litert")


def test_the_quantized_model_runs_as_ours_does(tflite, live, tmp_path):
    floats = tflite[0]
    quantize_folder(Export(floats, 0, 0.0), tmp_path / "int8")
    before, after = Manifest.read(floats), Manifest.read(tmp_path / "int8")
    assert (before.precision, after.precision) == ("f32", "int8")
    assert after.signatures == before.signatures
    (model,) = {each.file for each in after.signatures}
    assert after.files[model].size_bytes < 0.75 * before.files[model].size_bytes
    found = answers(open_program(tmp_path / "int8", threads=1))
    assert [len(each) for each in found] == [len(each) for each in live[100]]


def test_what_is_no_model_is_refused(tflite, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tflite[0], broken)
    (model,) = {each.file for each in Manifest.read(broken).signatures}
    (broken / model).write_bytes(b"\0" * (broken / model).stat().st_size)
    with pytest.raises(JaxllmError, match="ai-edge-quantizer failed"):
        quantize_folder(Export(broken, 0, 0.0), tmp_path / "int8")
