"""IREE modules: those of this host run when they are made and in our loop, those of Android hold its machine
code."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from export.signatures import ExportPlan
from export.subject import read_subject
from jaxllm.config import WHOLE
from jaxllm.errors import ConfigError, ProgramError
from jaxllm.program_folder.manifest import MANIFEST, WEIGHTS, Manifest
from serving.device.opening import open_device
from serving.programs.executor import open_executor
from serving.programs.iree import PROCESSOR
from serving.speculation.options import SpeculationOptions
from tests.export.models import CONTEXT, answers

pytest.importorskip("iree.compiler")

from export.iree import ANDROID, HOST, export_iree, module_file, require_machine, run_once

PLAN = ExportPlan(context_tokens=CONTEXT, chunk_tokens=(16,))
TREES = dataclasses.replace(PLAN, verify_tokens=(8,))


@pytest.fixture(scope="module")
def whole(elastic):
    return read_subject(elastic)


@pytest.fixture(scope="module")
def folder(whole, tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs") / "iree"
    export_iree(whole, folder, TREES)
    return folder


def test_weights_of_8_bits_are_widened_in_the_modules(subject, tmp_path):
    """Exporting runs each module once beside its step; level 40 has an adapter."""
    path = tmp_path / "int8"
    plan = dataclasses.replace(PLAN, levels=(40,))
    manifest = export_iree(subject, path, plan, targets=(HOST,), precision="int8")
    assert (manifest.precision, len(manifest.signatures)) == ("int8", 4)
    floats = sum(each.nbytes for each in subject.weights(WHOLE).values())
    assert (path / WEIGHTS).stat().st_size < 0.4 * floats


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
    plan = TREES.resolved(whole.cfg)
    run_once(module, decode(folder), whole, plan)
    cfg = dataclasses.replace(whole.cfg, attention_scale=1.0)
    level = dataclasses.replace(whole.levels[100], cfg=cfg)
    with pytest.raises(ProgramError, match="decode of IREE differs"):
        run_once(module, decode(folder), dataclasses.replace(whole, levels={100: level}), plan)


@pytest.mark.parametrize("drafts", [None, SpeculationOptions(drafter="ngram", pausing=False)])
def test_the_loop_answers_as_the_live_engine(folder, live, drafts):
    engine = open_device(folder, drafts=drafts, machine_code=True)
    assert answers(engine) == live[WHOLE]
    assert drafts is None or engine.speculation.counts.verifications > 0


def test_caches_grow_and_are_restored_as_they_are(folder):
    executor = open_executor(folder, machine_code=True)
    shapes = executor.manifest.cache_shapes(WHOLE, 8)
    rows = {name: np.random.default_rng(0).standard_normal(each, np.float32) for name, each in shapes.items()}
    caches = executor.restored(WHOLE, 16, rows)
    moved = executor.keep(decode(folder), caches, 2, np.array([0, 3]))
    found = executor.rows(WHOLE, executor.grow(WHOLE, moved, CONTEXT), 8)
    for name, each in rows.items():
        np.testing.assert_array_equal(found[name][:, :, 3], each[:, :, 5])
        np.testing.assert_array_equal(found[name][:, :, :3], each[:, :, :3])


def test_machine_code_runs_where_it_is_trusted(folder, tmp_path):
    with pytest.raises(ConfigError, match="machine code that nothing screens; run what you trust"):
        open_executor(folder)
    other = shutil.copytree(folder, tmp_path / "other")
    facts = json.loads((other / MANIFEST).read_text())
    facts["made_with"][PROCESSOR] = "0" * 32
    (other / MANIFEST).write_text(json.dumps(facts))
    with pytest.raises(ProgramError, match="compiled for another processor"):
        open_executor(other, machine_code=True)
    raw = bytearray((other / decode(folder).file).read_bytes())
    raw[100] ^= 1
    (other / decode(folder).file).write_bytes(raw)
    shutil.copy(folder / MANIFEST, other / MANIFEST)
    executor = open_executor(other, machine_code=True)
    with pytest.raises(ProgramError, match="checksum is wrong"):
        executor.prepare([decode(folder)])
