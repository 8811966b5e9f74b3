"""IREE modules: those of this host run when they are made, those of Android hold its machine code."""

import dataclasses

import pytest

from export.signatures import ExportPlan
from export.subject import read_subject
from jaxllm.errors import ConfigError, ProgramError
from jaxllm.program_folder.manifest import WEIGHTS, Manifest
from serving.programs.executor import open_executor
from tests.export.models import CONTEXT

pytest.importorskip("iree.compiler")

from export import iree
from export.iree import ANDROID, HOST, export_iree, module_file, require_machine, run_once

PLAN = ExportPlan(context_tokens=CONTEXT, chunk_tokens=(16,))


@pytest.fixture(scope="module")
def whole(elastic):
    return read_subject(elastic)


@pytest.fixture(scope="module")
def folder(whole, tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs") / "iree"
    export_iree(whole, folder, PLAN)
    return folder


def test_weights_of_8_bits_are_widened_in_the_modules(subject, folder, tmp_path):
    """Exporting runs each module once beside its step; level 40 has an adapter."""
    path = tmp_path / "int8"
    plan = dataclasses.replace(PLAN, levels=(40,))
    manifest = export_iree(subject, path, plan, targets=(HOST,), precision="int8")
    assert (manifest.precision, len(manifest.signatures)) == ("int8", 4)
    sizes = [(each / WEIGHTS).stat().st_size for each in (path, folder)]
    assert sizes[0] < 0.4 * sizes[1]


def decode(folder):
    (found,) = [each for each in Manifest.read(folder).signatures if each.kind == "decode"]
    return found


def test_there_is_a_module_for_each_signature_and_target(folder):
    for signature in Manifest.read(folder).signatures:
        for target in (HOST, ANDROID):
            assert (folder / module_file(signature, target)).stat().st_size > 1000


def test_machine_code_of_android(folder):
    require_machine((folder / module_file(decode(folder), ANDROID)).read_bytes(), "decode")
    with pytest.raises(ProgramError, match="not for 183"):
        require_machine((folder / module_file(decode(folder), HOST)).read_bytes(), "decode")
    with pytest.raises(ProgramError, match=r"machines \[\]"):
        require_machine(b"no code", "decode")


def test_a_module_that_computes_something_else_is_refused(folder, whole):
    module = (folder / module_file(decode(folder), HOST)).read_bytes()
    plan = PLAN.resolved(whole.cfg)
    run_once(module, decode(folder), whole, plan)
    cfg = dataclasses.replace(whole.cfg, attention_scale=1.0)
    level = dataclasses.replace(whole.levels[100], cfg=cfg)
    with pytest.raises(ProgramError, match="decode of IREE differs"):
        run_once(module, decode(folder), dataclasses.replace(whole, levels={100: level}), plan)


def test_the_loop_does_not_run_them(folder):
    with pytest.raises(ConfigError, match="export the model as stablehlo or tflite"):
        open_executor(folder)
    assert iree.SUFFIX == ".vmfb"
