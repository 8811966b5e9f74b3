"""StableHLO programs: their answers, with drafts too, their files, and what is refused."""

import copy
import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from jaxllm.config import FULL_LEVEL
from jaxllm.errors import ConfigError, ContextOverflow, ProgramError
from jaxllm.export.folder_format.manifest import TOKENIZER, WEIGHTS, Manifest, StoredFile, write_tokenizer
from jaxllm.export.folder_format.signature import cache_shapes
from jaxllm.export.folder_format.weights import read_weights, write_weights
from jaxllm.export.programs.jax_programs import StableHloExecutor
from jaxllm.export.programs.model import ProgramModel, open_program
from jaxllm.export.programs.runner import ProgramRunner
from jaxllm.export.signatures import ExportPlan, step_shapes
from jaxllm.export.stablehlo import PLATFORMS, export_stablehlo, traced
from jaxllm.export.subject import read_subject
from jaxllm.export.verification import run_of_folder, verify
from jaxllm.models.decoder import forward_documents, logits
from jaxllm.sampling import Sampling
from jaxllm.serving.buckets.bucket_table import CompiledBucketFolder
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.speculation.speculation import Speculation
from tests.copied_bytes import copied_bytes
from tests.export.conftest import PLAN
from tests.export.models import (
    ALWAYS,
    CFG,
    CONFIG,
    CONTEXT,
    DRAWN,
    PROMPTS,
    Branching,
    answers,
    require_same_answers,
    with_drafts,
)
from tests.tiny import TINY, tiny_params, write_tiny_bundle

pytest.importorskip("flatbuffers")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engine(stablehlo):
    engine = open_program(stablehlo)
    engine.warm_up()
    return engine


def test_levels_read_the_same_weights_and_answer_as_the_live_engine(engine, live):
    assert answers(engine) == live[100]
    assert answers(engine.at(40)) == live[40]
    weights = engine.model.executor._weights
    both = [name for name in weights[40] if name in weights[100]]
    assert {weights[40][name].shape == weights[100][name].shape for name in both} == {True, False}
    for name in both:
        here, there = (each[name].unsafe_buffer_pointer() for each in (weights[40], weights[100]))
        assert here == there or weights[40][name].nbytes % 64, name
    with pytest.raises(ConfigError, match=r"level 70 was not exported, only 40, 100"):
        engine.at(70)
    # An answer ends with the window; the last token need not fit.
    long = engine.generate(PROMPTS[4], GenerationConfig(max_tokens=50, ignore_eos=True))
    assert (long.finish_reason, len(long.sequence)) == ("length", CONTEXT + 1)
    with pytest.raises(ContextOverflow, match="65 tokens"):
        engine.generate([1] * 65)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "level"])
def test_nothing_is_compiled_under_a_request(stablehlo, compiles, drafter):
    drafts = None if drafter == "none" else SpeculationOptions(drafter="level", level=100, **ALWAYS)
    engine = open_program(stablehlo, speculation=drafts)
    engine.warm_up()
    # Neither is anything that other tests may have left.
    jax.clear_caches()
    sampling = Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=1)
    with compiles() as count:
        answers(engine)
        engine.generate(3 * [1, 50, 7, 99], dataclasses.replace(CONFIG, sampling=sampling))
        engine.generate(PROMPTS[3], dataclasses.replace(CONFIG, sampling=Sampling(temperature=1.0)))
    assert drafts is None or engine.speculation.counts.verifications
    assert count() == 0


def test_caches_are_as_short_as_a_sequence_and_grow_with_it(engine):
    table, executor, ran = engine.runner, engine.model.executor, []
    run = executor.run
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(executor, "run", lambda each, *rest: ran.append(each.name) or run(each, *rest))
        engine.generate(PROMPTS[3], CONFIG)
    # How many tokens a call decodes is a matter of time: caches grow when they could not hold them all.
    grown = ran.index("decode")
    assert ran[:3] == ["cache_32_prefill_16", "cache_32_prefill_16", "cache_32_decode"]
    assert set(ran[2:grown]) == {"cache_32_decode"}
    assert ran[grown:] == ["decode"] * (len(ran) - grown)
    assert len(ran) == 2 + CONFIG.max_tokens
    # They are donated.
    cache = table.start(4)
    buffers = list(cache.caches.values())
    prefill_prompt(table, cache, [1, 2, 3], 0)
    assert all(each.is_deleted() for each in buffers)


def test_text_is_scored_as_a_whole_document_is(engine):
    tokens = PROMPTS[4]
    params = {name: jax.numpy.asarray(value) for name, value in tiny_params(CFG).items()}
    hidden = forward_documents(params, np.array([tokens[:-1]], np.int32), cfg=CFG)
    scores = jax.nn.log_softmax(logits(params, hidden, cfg=CFG))[0]
    want = np.asarray(scores)[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(engine.runner.score(tokens[:-1], tokens[1:]), want, atol=2e-4)
    # Without programs that verify, token by token.
    executor, manifest = copy.copy(engine.model.executor), engine.model.executor.manifest
    kept = tuple(each for each in manifest.signatures if each.kind != "verify")
    executor.manifest = dataclasses.replace(manifest, signatures=kept)
    engine = Engine(ProgramModel(executor, engine.tokenizer))
    np.testing.assert_allclose(engine.runner.score(tokens[:-1], tokens[1:]), want, atol=2e-4)


_ALONE = """
import sys
from jaxllm.export.programs.model import open_program
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.speculation_options import SpeculationOptions
drafts = SpeculationOptions(model=sys.argv[1], pausing=False)
engine = open_program(sys.argv[1], speculation=drafts)
tokens = engine.generate([1, 50, 7, 99, 23], GenerationConfig(max_tokens=12, ignore_eos=True)).tokens
assert engine.speculation.counts.verifications
print(*tokens)
print(*sys.modules)
"""


def test_programs_run_without_the_code_that_made_them(stablehlo, live):
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, str(stablehlo)], capture_output=True, text=True, check=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    said, modules = done.stdout.splitlines()
    assert [int(each) for each in said.split()] == live[100][1]
    unwanted = (
        "flax.", "jaxllm.export.stablehlo.", "jaxllm.export.signatures.", "jaxllm.bundle.",
        "jaxllm.models.decoder.", "jaxllm.models.layer.", "jaxllm.nn.linear.", "jaxllm.steps.model.",
    )  # fmt: skip
    assert not [name for name in modules.split() if f"{name}.".startswith(unwanted)]


def test_weights_are_stored_once(stablehlo, subject):
    params = sum(value.nbytes for value in tiny_params(CFG).values())
    adapters = sum(array.nbytes for name, array in subject.arrays.items() if name.startswith("level_"))
    assert adapters
    stored = read_weights(stablehlo / WEIGHTS, model=subject.model)
    assert sum(array.nbytes for array in stored.values()) == params + adapters
    # Beside them there is a header, and programs hold no weights.
    assert (stablehlo / WEIGHTS).stat().st_size < params + adapters + 10_000
    for each in Manifest.read(stablehlo).signatures:
        assert (stablehlo / each.file).stat().st_size < params / 2, each.name


@pytest.mark.usefixtures("own_compilations")
def test_compiled_programs_are_kept(stablehlo, tmp_path, monkeypatch, compiles):
    manifest, kept = Manifest.read(stablehlo), CompiledBucketFolder(tmp_path / "kept", limit_bytes=1 << 30)
    first = ProgramRunner(StableHloExecutor(manifest, stablehlo, kept))
    first.executor.prepare(first.request_signatures(20, 4))
    again = ProgramRunner(StableHloExecutor(manifest, stablehlo, kept))
    with compiles() as count:
        again.executor.prepare(again.request_signatures(20, 4))
    assert count() == 0
    outs = [prefill_prompt(table, table.start(20), PROMPTS[2], 0)[0] for table in (first, again)]
    np.testing.assert_array_equal(*outs)


def test_one_artifact_serves_all_platforms(subject):
    plan = PLAN.resolved(CFG)
    (decode,) = [each for each in plan.signatures(40, str) if each.name == "level_40_decode"]
    program = traced(decode, subject, plan, precision="bf16", platforms=PLATFORMS)
    assert program.platforms == ("cpu", "cuda", "tpu")
    # Nothing of this machine's kernels: whoever loads it has none of their calls.
    assert "custom_call" not in program.mlir_module()


# Drafts: the same answers, whoever drafts


@pytest.mark.slow
@pytest.mark.parametrize("level", [100, 0])
def test_answers_are_those_without_drafts(engine, level):
    own = {"drafter": "level", "level": level} if level else {"drafter": "ngram"}
    counts = require_same_answers(with_drafts(engine, **own), engine)
    if level == 100:
        # Lines that it is hardly sure of are short, and what is drawn is seldom the likeliest.
        assert counts.acceptance_length > 2


@pytest.mark.parametrize("config", [CONFIG, DRAWN])
def test_an_accepted_branch_moves_behind_the_sequence(engine, config):
    wanted = engine.generate(PROMPTS[1], config)
    trees = TreeShape(nodes=(8,), room=8)
    options = SpeculationOptions(drafter="ngram", **ALWAYS, trees=trees)
    drafter = Branching(wanted.sequence, 8)
    engine = engine.at(100)
    engine.speculation = Speculation(engine.runner, drafter, options)
    assert engine.generate(PROMPTS[1], config).tokens == wanted.tokens
    assert drafter.times.steps > 2
    assert engine.speculation.counts.acceptance_length > 2


def test_drafters_that_do_not_fit(stablehlo, engine, tmp_path):
    with pytest.raises(ConfigError, match=r"no such folder; make one with `jaxllm export`"):
        with_drafts(engine, model=tmp_path / "none")
    with pytest.raises(ConfigError, match="no drafter 'oracle'"):
        with_drafts(engine, drafter="oracle")
    folder = shutil.copytree(stablehlo, tmp_path / "copy")
    manifest = Manifest.read(folder)
    kept = tuple(each for each in manifest.signatures if each.kind != "verify")
    dataclasses.replace(manifest, signatures=kept).write(folder)
    with pytest.raises(ConfigError, match=r"verify no drafts; export the model with --verify-tokens"):
        open_program(folder, speculation=SpeculationOptions(drafter="ngram"))
    files = manifest.read_tokenizer(folder)
    swapped = files.tokenizer_json.replace('"!"', '"\\u0000\\u0000"', 1)
    write_tokenizer(folder / TOKENIZER, dataclasses.replace(files, tokenizer_json=swapped))
    stored = {**manifest.files, TOKENIZER: StoredFile.of(folder / TOKENIZER)}
    dataclasses.replace(manifest, files=stored).write(folder)
    with pytest.raises(ConfigError, match="another tokenizer"):
        with_drafts(engine, model=folder)


# What is refused


def test_folders_of_other_weights_and_devices(stablehlo, subject, tmp_path):
    folder, manifest = Path(shutil.copytree(stablehlo, tmp_path / "copy")), Manifest.read(stablehlo)
    write_weights(folder / WEIGHTS, subject.arrays, model="another")
    with pytest.raises(ProgramError):
        open_program(folder)
    # Even if somebody fits the manifest to it.
    files = {**manifest.files, WEIGHTS: StoredFile.of(folder / WEIGHTS)}
    dataclasses.replace(manifest, files=files).write(folder)
    with pytest.raises(ProgramError, match="another bundle"):
        open_program(folder)
    dataclasses.replace(manifest, files=files, platforms=("tpu",)).write(folder)
    with pytest.raises(ConfigError, match=r"exported for tpu, this device is cpu; .*--platform cpu"):
        open_program(folder)


def test_a_program_that_computes_something_else_is_not_exported(stablehlo, subject):
    run, plan = run_of_folder(stablehlo, subject), PLAN.resolved(subject.cfg)
    decode = [each for each in Manifest.read(stablehlo).signatures if each.name == "decode"]
    verify(run, decode, subject, plan, "f32")
    arrays = {**subject.arrays, "embed.tokens": subject.arrays["embed.tokens"] * 1.01}
    with pytest.raises(
        ProgramError, match=r"the program decode differs from its step by 0\.\d+% in kv_cache_k_0"
    ):
        verify(run, decode, dataclasses.replace(subject, arrays=arrays), plan, "f32")


def test_what_is_refused_or_fails_leaves_nothing(subject, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    with monkeypatch.context() as patched:
        patched.setattr(
            importlib.util, "find_spec", lambda name, *of: None if name == "flatbuffers" else found(name, *of)
        )
        with pytest.raises(ConfigError, match=r"pip install 'jaxllm\[stablehlo\]'"):
            export_stablehlo(subject, tmp_path / "out", PLAN)
    with pytest.raises(ConfigError, match="exists already"):
        export_stablehlo(subject, tmp_path, PLAN)
    with pytest.raises(ConfigError, match="got abacus"):
        export_stablehlo(subject, tmp_path / "out", PLAN, platforms=("abacus",))
    monkeypatch.setattr("jaxllm.export.stablehlo.verify", Mock(side_effect=ProgramError("no")))
    least = dataclasses.replace(PLAN, verify_tokens=(), cache_tokens=())
    with pytest.raises(ProgramError):
        export_stablehlo(subject, tmp_path / "out", least, platforms=("cpu",))
    assert list(tmp_path.iterdir()) == []


def test_plans_that_cannot_be():
    for options, part in (
        ({"chunk_tokens": (32, 16)}, "ascending"),
        ({"block_tokens": 1}, "block_tokens must be at least 2"),
        ({"codec": "other"}, "no codec 'other'"),
        ({"context_tokens": 1000}, "window of 128"),
        ({"context_tokens": 8}, "no chunk"),
        ({"context_tokens": 16, "verify_tokens": (32,)}, "do not fit the context of 16"),
        ({"cache_tokens": (8,)}, "hold the shortest chunk of 16"),
    ):
        with pytest.raises(ConfigError, match=part):
            ExportPlan(**options).resolved(CFG)


# Programs write new rows into the caches that they are given, and copy none.


LAYERS, ROOM = 4, 512
DEEP_PLAN = ExportPlan(
    context_tokens=ROOM, chunk_tokens=(16, 64), cache_tokens=(), verify_tokens=(8,), block_tokens=4
)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    cfg = dataclasses.replace(TINY, layers=LAYERS, window_tokens=ROOM, attention_windows=())
    path = tmp_path_factory.mktemp("export") / "tiny.jaxllm"
    return read_subject(write_tiny_bundle(path, cfg=cfg))


def compiled(signature, deep, *, branches):
    """A program of all platforms, as this CPU compiles it."""
    program = traced(signature, deep, DEEP_PLAN, precision="f32", platforms=PLATFORMS, branches=branches)
    step = jax.jit(program.call, donate_argnums=(1,), keep_unused=True)
    return step.lower(*step_shapes(signature, deep, DEEP_PLAN, np.dtype(np.float32))).compile()


@pytest.mark.parametrize("name", ["decode", "block_4", "verify_8", "prefill_16", "prefill_64"])
def test_no_cache_is_copied(deep, name, shipped_compilations):
    (signature,) = (
        each for each in DEEP_PLAN.resolved(deep.cfg).signatures(FULL_LEVEL, str) if each.name == name
    )
    one = 4 * int(np.prod(next(iter(cache_shapes(deep.cfg, ROOM).values()))))
    # What a block copies are its controls.
    assert copied_bytes(compiled(signature, deep, branches=True)) < one
    if name == "decode":
        assert copied_bytes(compiled(signature, deep, branches=False)) >= 2 * LAYERS * one
