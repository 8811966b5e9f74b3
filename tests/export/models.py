"""Tiny models to export, and checks of drafted answers of their programs, for every runtime."""

import dataclasses
import importlib.util
import io

import jax
import numpy as np
import pytest

from jaxllm.bundle.levels import Recovery, elastic_parts
from jaxllm.bundle.tiny_lm import tiny_lm_parts
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.export.device.opening import open_device
from jaxllm.models.lora import LoraConfig, init_adapter
from jaxllm.models.tiny_lm import TlmConfig
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.speculation.costs import DraftTimes
from jaxllm.serving.speculation.drafter import Drafter
from jaxllm.speculation.token_tree import grown, root_alone
from tests.export.sizes import CFG as CFG
from tests.export.sizes import CHUNKS as CHUNKS
from tests.export.sizes import CONFIG as CONFIG
from tests.export.sizes import CONTEXT as CONTEXT
from tests.export.sizes import PROMPTS as PROMPTS
from tests.export.sizes import answers as answers
from tests.models.test_lora import random_adapter
from tests.tiny import tiny_tokenizer, write_tiny_bundle
from tests.tiny_tlm import ENCODER, random_tlm, tiny_lm

LADDER = Ladder(levels=(40, 70, 100))
OPTIONS = EngineOptions(
    context_tokens=CONTEXT, cache_tokens=(CONTEXT,), chunk_tokens=CHUNKS, levels=(40,), buckets_bytes=0
)


def require_model(package):
    """Skips where a package that has a model is missing; it is not imported, for want of its own packages."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}: see make test-export")


def write_elastic(path, scaling=0.5):
    """An elastic bundle of float weights whose level 40 has an adapter of its own."""
    adapter = init_adapter(
        sub_config(CFG, LADDER, 40), LoraConfig(rank=2, targets=("attn.q", "ffn.down")), jax.random.key(1)
    )
    draw = np.random.default_rng(1)
    adapter = {name: draw.normal(size=part.shape).astype(np.float32) * 0.3 for name, part in adapter.items()}
    parts = elastic_parts(LADDER, {40: Recovery(adapter, scaling)})
    return write_tiny_bundle(path, cfg=CFG, parts=parts)


def write_planned(path):
    """An elastic bundle with a tiny LM that has a tokenizer of its own, and a matrix that is served at 8
    bits."""
    encoder = dataclasses.replace(ENCODER, hidden_size=256, ffn_size=256)
    ratios = (0.25, 0.5, 1.0)
    cfg = TlmConfig(encoder=encoder, shared_layers=1, levels=len(LADDER.levels), prompt_levels=len(ratios))
    # Larger ones are chaotic: rounding decides.
    params = {name: value / 2 for name, value in random_tlm(cfg).items()}
    tiny = tiny_lm(LADDER.levels, ratios, cfg=cfg, params=params, tokenizer=tiny_tokenizer(chat=False))
    parts = {**elastic_parts(LADDER), **tiny_lm_parts(tiny)}
    return write_tiny_bundle(path, cfg=CFG, parts=parts), tiny


def write_adapters(folder):
    """Two adapters of `CFG` by name, of different ranks and targets."""
    named = {"mail": (4, LoraConfig.targets), "notes": (2, ("attn.q", "ffn.down"))}
    for seed, (name, (rank, targets)) in enumerate(named.items()):
        lora = LoraConfig(rank=rank, alpha=16, targets=targets)
        write_adapter(folder / name, CFG, lora, random_adapter(CFG, lora, seed))
    return {name: folder / name for name in named}


def models_of(path, folder):
    """The `.tflite` models in a LiteRT-LM file, in the order of their names."""
    from litert_lm_builder import litertlm_peek

    litertlm_peek.peek_litertlm_file(str(path), str(folder), io.StringIO())
    return [each.read_bytes() for each in sorted(folder.glob("*.tflite"))]


def exported(kind, subject, folder, plan):
    """Programs of a format, "stablehlo" or "tflite", or of its precision, "tflite int8", opened as a device
    does; skips where its packages are missing."""
    if kind == "stablehlo":
        pytest.importorskip("flatbuffers")
        from jaxllm.export.stablehlo import export_stablehlo

        export_stablehlo(subject, folder, plan, platforms=("cpu",))
    else:
        pytest.importorskip("litert_converter")
        from jaxllm.export.tflite import export_tflite

        export_tflite(subject, folder, plan, precision=kind.partition(" ")[2] or "f32")
    return open_device(folder, threads=1)


DRAWN = GenerationConfig(
    max_tokens=12,
    ignore_eos=True,
    sampling=Sampling(temperature=1.0, seed=3, top_p=0.9, repetition_penalty=1.2),
)
# The model is random: what it is sure of is little, and no draft is given up.
ALWAYS = {"alpha": 1e-6, "fallback": "fixed", "pausing": False}


def with_drafts(plain, **options):
    """An engine over the same programs that drafts: the whole model, as a level, drafts for itself."""
    engine = Engine(plain.model)
    options = SpeculationOptions(**ALWAYS, **options)
    engine.speculation = engine.model.drafts(100, options, threads=1)
    return engine


def require_same_answers(engine, plain):
    """Greedy ones, drawn ones, and those of a second turn."""
    for config in (CONFIG, DRAWN):
        for prompt in PROMPTS:
            assert engine.generate(prompt, config).tokens == plain.generate(prompt, config).tokens
    counts = engine.speculation.counts
    assert counts.tokens + counts.plain_tokens == 2 * len(PROMPTS) * (CONFIG.max_tokens - 1)
    assert counts.tokens == counts.verifications + counts.accepted
    session = Session()
    first = engine.stream(PROMPTS[2], CONFIG, session=session).result()
    longer = [*first.sequence, 5, 6]
    second = engine.stream(longer, CONFIG, session=session).result()
    assert second.reused_tokens == len(first.sequence) - 1
    assert second.tokens == plain.generate(longer, CONFIG).tokens
    # Up to the end of the window, where no tree fits.
    long = GenerationConfig(max_tokens=2 * CONTEXT, ignore_eos=True)
    assert engine.generate(PROMPTS[1], long).tokens == plain.generate(PROMPTS[1], long).tokens
    return counts


class Branching(Drafter):
    """A drafter that grows, behind the true continuation's first tokens, wrong branches before right ones, so
    that what is accepted lies apart (see `Drafter`)."""

    def __init__(self, answer, room):
        self.times = DraftTimes(run_s=1e-3, step_s=1e-3)
        self._answer, self._room = answer, room

    def grow(self, sequence, root, growing, cache):
        behind = [*sequence, root]
        true = self._answer[len(behind) : len(behind) + 2]
        if len(true) < 2 or list(self._answer[: len(behind)]) != behind:
            return root_alone(root, self._room), cache
        wrong = [(token + 1) % 7 for token in true]
        # Wrong and right children of the root, then of the right one.
        tokens = [wrong[0], true[0], wrong[1], true[1]]
        drafted = grown(root_alone(root, self._room), tokens, [0, 0, 2, 2], [0.9, 0.8, 0.7, 0.6])
        return drafted, cache

    def follow(self, path, token):
        self.times.steps += int(np.any(np.diff(path) > 1))
