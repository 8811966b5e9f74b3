"""Makes what is harmed: a small whole example of each kind of file."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np

FACTS, WITHOUT_FILES = "facts.json", "model"
CONTEXT_TOKENS = 128
PROMPT = [1, 50, 7, 99, 23]


def make_victims(folder: Path) -> None:
    """Writes all victims, each as a folder of its own.

    Args:
      folder: which is made.
    """
    from tests.bundle.forging import MIXED, params_of
    from tests.tiny import write_tiny_bundle, write_tiny_folder

    folder.mkdir(parents=True)
    plain = folder / WITHOUT_FILES / "model.jaxllm"
    plain.parent.mkdir()
    write_tiny_bundle(plain)
    for name in ("bundle", "elastic", "mixture", "apart", "calibrated"):
        (folder / name).mkdir()
    write_tiny_bundle(folder / "bundle" / "model.jaxllm", "int8")
    _write_elastic(folder / "elastic" / "model.jaxllm")
    write_tiny_bundle(folder / "mixture" / "model.jaxllm", "int8", cfg=MIXED, params=params_of(MIXED))
    _write_apart(folder / "apart" / "model.jaxllm")
    _write_calibrated(folder / "calibrated" / "model.jaxllm")
    write_tiny_folder(folder / "folder")
    shutil.copytree(folder / "folder", folder / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    _write_adapter(folder / "adapter")
    _write_small_files(folder)
    _write_program(folder / "program", folder / "elastic" / "model.jaxllm")
    facts = {"tokens": _write_graphs(folder / "graphs", plain), "contexts": _write_contexts(folder, plain)}
    (folder / FACTS).write_text(json.dumps(facts))


def _write_elastic(path: Path) -> None:
    from jaxllm.bundle.elastic import elastic_parts
    from jaxllm.bundle.tiny_lm import tiny_lm_parts
    from jaxllm.elastic.ladder import Ladder
    from tests.tiny import write_tiny_bundle
    from tests.tiny_tlm import tiny_lm

    parts = elastic_parts(Ladder(levels=(40, 70, 100))) | tiny_lm_parts(tiny_lm((40, 70, 100), (0.5, 1.0)))
    write_tiny_bundle(path, "int8", parts=parts)


def _write_apart(path: Path) -> None:
    from tests.bundle.forging import MIXED, params_of
    from tests.tiny import write_tiny_bundle

    widths = np.array([[2, 4, 8]])
    write_tiny_bundle(path, "f32", cfg=MIXED, params=params_of(MIXED), expert_bits=widths)


def _write_calibrated(path: Path) -> None:
    from jaxllm.bundle.prefill import prefill_parts
    from tests.prefill.calibrated import calibrated, outlying
    from tests.tiny import write_tiny_bundle

    write_tiny_bundle(path, "int8", params=outlying(), parts=prefill_parts(calibrated()))


def _write_adapter(folder: Path) -> None:
    from jaxllm.checkpoints.peft_folder import write_adapter
    from jaxllm.lora import LoraConfig, init_adapter
    from tests.tiny import TINY

    lora = LoraConfig(rank=4, alpha=8, targets=("attn.q", "ffn.down"))
    adapter = {name: np.asarray(each) for name, each in init_adapter(TINY, lora, jax.random.key(1)).items()}
    folder.mkdir()
    write_adapter(folder, TINY, lora, adapter, base="tiny")


def _write_small_files(folder: Path) -> None:
    from jaxllm.tasks.example import TaskExample
    from serving.profile import DeviceProfile, save_profile
    from serving.trace import make_trace, write_trace

    questions = {"mood": [TaskExample(user="how?", answer="well", options=("well", "unwell"))]}
    (folder / "trace").mkdir()
    write_trace(folder / "trace" / "trace.jsonl", make_trace(questions, requests=4))
    profile = DeviceProfile(
        levels=(50, 100), tokens=(16, 64), chunk_tokens=(16, 64),
        ttft_ms=((1.0, 4.0), (2.0, 8.0)), tpot_ms=((0.5, 0.6), (1.0, 1.2)),
    )  # fmt: skip
    save_profile(profile, folder / "profile" / "profile.json")
    recipes = Path(__file__).parents[2] / "training" / "recipes"
    (folder / "recipe").mkdir()
    shutil.copy(recipes / "draft.toml", folder / "recipe" / "pretrain.toml")
    shutil.copy(sorted((recipes / "elastic").glob("*.toml"))[0], folder / "recipe" / "elastic.toml")
    _write_tasks(folder / "tasks" / "tasks")


def _write_tasks(folder: Path) -> None:
    lines = {
        "sst2": {"text": "a fine film", "label": "positive"},
        "agnews": {"text": "stocks fell", "label": "Business"},
        "samsum": {"dialogue": "A: hi\nB: hello", "summary": "They greet."},
    }
    for name, line in lines.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "valid.jsonl").write_text(3 * (json.dumps(line) + "\n"))
    step = {"label": ["button", "Save"], "history": [], "state": "<button id=0>Save</button>"}
    app = {"notes": {"save a note": {"task": "save a note", "profile": [step]}}}
    (folder / "ui_automation").mkdir()
    (folder / "ui_automation" / "steps.json").write_text(json.dumps(app))


def _write_program(folder: Path, bundle: Path) -> None:
    from export.signatures import ExportPlan
    from export.stablehlo import export_stablehlo
    from export.subject import read_subject

    plan = ExportPlan(
        context_tokens=CONTEXT_TOKENS, chunk_tokens=(16,), verify_tokens=(), cache_tokens=(), levels=()
    )
    export_stablehlo(read_subject(bundle, levels=()), folder, plan, platforms=("cpu",))


def _write_graphs(folder: Path, bundle: Path) -> list[int]:
    from serving.engine import Engine
    from tests.torture.uses import _CONFIG, _OPTIONS

    before = os.environ["JAXLLM_CACHE"]
    os.environ["JAXLLM_CACHE"] = str(folder)
    folder.mkdir(mode=0o700)
    try:
        engine = Engine.open(bundle, options=dataclasses.replace(_OPTIONS, executables_bytes=1 << 28))
        tokens = engine.generate(PROMPT, _CONFIG).tokens
        engine.close()
    finally:
        os.environ["JAXLLM_CACHE"] = before
    return list(tokens)


def _write_contexts(folder: Path, bundle: Path) -> dict[str, list[int]]:
    from serving.contexts.context import Context
    from serving.contexts.manager import Contexts
    from serving.contexts.options import ContextOptions
    from tests.torture.uses import _context_engine

    contexts = Contexts(_context_engine(bundle), ContextOptions(folder=folder / "contexts" / "store"))
    said = {}
    for app, turns in (("mail", (30, 20)), ("calendar", (20,))):
        context = Context(contexts, contexts.create(app))
        for turn in turns:
            context.generate([(7 * n) % 250 for n in range(turn)], max_tokens=4, ignore_eos=True).result()
        said[context.name] = list(context.tokens)
    contexts.close()
    _context_engine.cache_clear()
    return said
