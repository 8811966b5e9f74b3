"""Makes what is harmed: a small whole example of each kind of file."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np

FACTS, WITHOUT_FILES = "facts.json", "model"
CONTEXT_TOKENS = 128
PROMPT = [1, 50, 7, 99, 23]


def make_victims(folder: Path, names: Collection[str] = ()) -> None:
    """Writes victims, each as a folder of its own, and beside them a model and facts that uses compare with.

    Args:
      folder: which is made.
      names: of those that are wanted; none for all.
    """
    from tests.tiny import write_tiny_bundle

    folder.mkdir(parents=True)
    plain = folder / WITHOUT_FILES / "model.jaxllm"
    plain.parent.mkdir()
    write_tiny_bundle(plain)
    facts = {}
    for name, write in _MAKERS.items():
        if not names or name in names:
            (folder / name).mkdir(mode=0o700)
            facts[name] = write(folder / name, plain)
    (folder / FACTS).write_text(json.dumps(facts))


def _write_bundle(folder: Path, _: Path) -> None:
    """A bundle of the kind that the folder is named after."""
    from jaxllm.bundle.calibrations import prefill_parts
    from jaxllm.bundle.levels import elastic_parts
    from jaxllm.bundle.tiny_lm import tiny_lm_parts
    from jaxllm.elastic.ladder import Ladder
    from tests.bundle.forging import MIXED, params_of
    from tests.int8_prefill.calibrated import calibrated, outlying
    from tests.tiny import write_tiny_bundle
    from tests.tiny_tlm import tiny_lm

    weights = "int8"
    more: dict[str, Any] = {}
    match folder.name:
        case "mixture" | "apart":
            more = {"cfg": MIXED, "params": params_of(MIXED)}
            if folder.name == "apart":
                weights, more["expert_bits"] = "f32", np.array([[2, 4, 8]])
        case "elastic":
            levels = (40, 70, 100)
            more["parts"] = elastic_parts(Ladder(levels=levels)) | tiny_lm_parts(tiny_lm(levels, (0.5, 1.0)))
        case "calibrated":
            more = {"params": outlying(), "parts": prefill_parts(calibrated())}
    write_tiny_bundle(folder / "model.jaxllm", weights, **more)


def _write_folder(folder: Path, _: Path) -> None:
    from tests.tiny import write_tiny_folder

    write_tiny_folder(folder)


def _write_tokenizer(folder: Path, _: Path) -> None:
    _write_folder(folder, _)
    for path in folder.glob("*.safetensors"):
        path.unlink()


def _write_adapter(folder: Path, _: Path) -> None:
    from jaxllm.checkpoints.peft import write_adapter
    from jaxllm.models.lora import LoraConfig, init_adapter
    from tests.tiny import TINY

    lora = LoraConfig(rank=4, alpha=8, targets=("attn.q", "ffn.down"))
    adapter = {name: np.asarray(each) for name, each in init_adapter(TINY, lora, jax.random.key(1)).items()}
    write_adapter(folder, TINY, lora, adapter, base="tiny")


def _write_trace(folder: Path, _: Path) -> None:
    from benchmarks.traces import make_trace, write_trace
    from jaxllm.tasks.example import TaskExample

    questions = {"mood": [TaskExample(user="how?", answer="well", options=("well", "unwell"))]}
    write_trace(folder / "trace.jsonl", make_trace(questions, requests=4))


def _write_profile(folder: Path, _: Path) -> None:
    from jaxllm.serving.elastic.profile import DeviceProfile, save_profile

    times = {"ttft_ms": ((1.0, 4.0), (2.0, 8.0)), "tpot_ms": ((0.5, 0.6), (1.0, 1.2))}
    profile = DeviceProfile(levels=(50, 100), tokens=(16, 64), chunk_tokens=(16, 64), **times)
    save_profile(profile, folder / "profile.json")


def _write_recipe(folder: Path, _: Path) -> None:
    recipes = Path(__file__).parents[2] / "training" / "recipes"
    for name in ("pretrain/draft.toml", "pretrain/family.base.toml", "elastic/family.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(recipes / name, folder / name)


def _write_tasks(folder: Path, _: Path) -> None:
    lines = {
        "sst2": {"text": "a fine film", "label": "positive"},
        "agnews": {"text": "stocks fell", "label": "Business"},
        "samsum": {"dialogue": "A: hi\nB: hello", "summary": "They greet."},
    }
    for name, line in lines.items():
        (folder / "tasks" / name).mkdir(parents=True)
        (folder / "tasks" / name / "valid.jsonl").write_text(3 * (json.dumps(line) + "\n"))
    step = {"label": [0, "Save"], "history": "", "state": "<button id=0>Save</button>"}
    # Of so many goals some are held out.
    app = {"notes": {f"save {n}": {"task": f"save {n}", "profile": [step]} for n in range(12)}}
    (folder / "tasks" / "ui_automation").mkdir()
    (folder / "tasks" / "ui_automation" / "steps.json").write_text(json.dumps(app))


def _write_program(folder: Path, bundle: Path) -> None:
    from jaxllm.export.signatures import ExportPlan
    from jaxllm.export.stablehlo import export_stablehlo
    from jaxllm.export.subject import read_subject

    sizes = {"context_tokens": CONTEXT_TOKENS, "chunk_tokens": (16,)}
    plan = ExportPlan(**sizes, verify_tokens=(), cache_tokens=(), levels=())
    # Into a folder that it makes.
    folder.rmdir()
    export_stablehlo(read_subject(bundle, levels=()), folder, plan, platforms=("cpu",))


def _write_graphs(folder: Path, bundle: Path) -> list[int]:
    from jaxllm import Engine
    from tests.torture.uses import _CONFIG, _OPTIONS

    before = os.environ["JAXLLM_CACHE"]
    os.environ["JAXLLM_CACHE"] = str(folder)
    try:
        engine = Engine.open(bundle, options=dataclasses.replace(_OPTIONS, buckets_bytes=1 << 28))
        tokens = engine.generate(PROMPT, _CONFIG).tokens
        engine.close()
    finally:
        os.environ["JAXLLM_CACHE"] = before
    return list(tokens)


def _write_contexts(folder: Path, bundle: Path) -> dict[str, list[int]]:
    from jaxllm.serving.contexts.context import Context
    from jaxllm.serving.contexts.manager import Contexts
    from jaxllm.serving.contexts.options import ContextOptions
    from tests.torture.uses import context_engine

    contexts = Contexts(context_engine(bundle), ContextOptions(folder=folder / "store"))
    said = {}
    for app, turns in (("mail", (30, 20)), ("calendar", (20,))):
        context = Context(contexts, contexts.create(app))
        for turn in turns:
            context.generate([(7 * n) % 250 for n in range(turn)], max_tokens=4, ignore_eos=True).result()
        said[context.name] = list(context.tokens)
    contexts.close()
    context_engine.cache_clear()
    return said


_MAKERS: dict[str, Callable[[Path, Path], object]] = {
    **dict.fromkeys(("elastic", "mixture", "apart", "calibrated"), _write_bundle),
    **{name.removeprefix("_write_"): write for name, write in list(globals().items()) if "_write_" in name},
}
