"""Programs that decode several tokens in one dispatch say what programs of one token say, whatever the
sampling, and compile nothing under a request."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxllm.errors import ProgramError
from jaxllm.export.folder_format.signature import COUNT, NEXT_TOKENS
from jaxllm.export.programs.live import LiveExecutor
from jaxllm.export.programs.model import ProgramModel, open_program
from jaxllm.export.programs.runner import ProgramRunner
from jaxllm.export.signatures import ExportPlan
from jaxllm.sampling_state import Sampling
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.text.tokenizer import Tokenizer
from tests.export.models import CFG, CHUNKS, CONFIG, CONTEXT, PROMPTS, exported
from tests.tiny import tiny_params, tiny_tokenizer

BLOCK = 4
PLAN = ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS, cache_tokens=(), block_tokens=BLOCK)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=1.3, top_k=5, seed=4),
    Sampling(temperature=0.7, top_p=0.8, min_p=0.02, seed=5),
    Sampling(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, seed=6, logit_bias=((3, 4.0),)),
    Sampling(repetition_penalty=1.5, frequency_penalty=0.2),
)


def said(engine):
    """Answers of all samplings; and one that ends in the middle of a block."""
    found = [
        engine.generate(PROMPTS[1], dataclasses.replace(CONFIG, sampling=each)).tokens for each in SAMPLINGS
    ]
    # Its last block must not write behind the caches.
    found.append(engine.generate(PROMPTS[4], dataclasses.replace(CONFIG, max_tokens=40)).tokens)
    stop = dataclasses.replace(CONFIG, stop_token_ids=(found[0][6],))
    return [*found, engine.generate(PROMPTS[1], stop).tokens]


def live(block):
    params = {name: jax.numpy.asarray(value) for name, value in tiny_params(CFG).items()}
    executor = LiveExecutor(
        "tiny", params, CFG, context_tokens=CONTEXT, chunk_tokens=CHUNKS, block_tokens=block
    )
    return Engine(ProgramModel(executor, Tokenizer(tiny_tokenizer())))


@pytest.fixture(scope="module")
def one_by_one():
    return said(live(0))


@pytest.fixture(scope="module")
def engine():
    engine = live(BLOCK)
    engine.warm_up()
    return engine


def test_tokens_that_no_block_may_give(engine, monkeypatch):
    run = engine.model.executor.run
    for tokens in ([], [1, CFG.vocab_size], [-2], [1] * (BLOCK + 1)):

        def wrong(signature, inputs, caches, tokens=tokens):
            out, caches = run(signature, inputs, caches)
            if signature.kind != "block":
                return out, caches
            return {NEXT_TOKENS: np.array([tokens], np.int32), COUNT: np.array([len(tokens)])}, caches

        monkeypatch.setattr(engine.model.executor, "run", wrong)
        with pytest.raises(ProgramError, match="block_4 gave"):
            engine.generate(PROMPTS[1], CONFIG)


def test_a_loop_on_the_device(engine, one_by_one, compiles, monkeypatch):
    dispatched = []
    run = engine.model.executor.run

    def counted(signature, *arguments):
        out, caches = run(signature, *arguments)
        dispatched.extend(np.asarray(out[COUNT]).tolist() if signature.kind == "block" else [])
        return out, caches

    monkeypatch.setattr(engine.model.executor, "run", counted)
    # Neither is anything that other tests may have left.
    jax.clear_caches()
    with compiles() as count:
        assert said(engine) == one_by_one
    assert count() == 0
    assert max(dispatched) == BLOCK
    # The first token comes of the prompt, and all others of blocks.
    assert sum(dispatched) == sum(map(len, one_by_one)) - len(one_by_one)


def test_a_chunk_that_short_caches_have_no_program_for_is_run_in_shorter_ones():
    params = {name: jax.numpy.asarray(value) for name, value in tiny_params(CFG).items()}
    prompt, found = [(3 * i) % CFG.vocab_size for i in range(30)], []
    for chunks, planned in (((16,), [16, 17]), ((16, 48), [49])):
        executor = LiveExecutor(
            "tiny", params, CFG, context_tokens=CONTEXT, chunk_tokens=chunks, cache_tokens=(32,)
        )
        runner = ProgramRunner(executor)
        assert [each.tokens for each in runner.prefill_chunks(len(prompt))] == planned
        names = [each.name for each in runner.request_signatures(len(prompt), 2)]
        assert names == ["cache_32_prefill_16", "cache_32_decode"]
        found.append(np.asarray(prefill_prompt(runner, runner.start(32), prompt, 0)[0]))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("kind", ["stablehlo", "tflite"])
def test_programs_that_were_exported(kind, subject, one_by_one, tmp_path):
    """Those of TFLite have no loops."""
    whole = dataclasses.replace(subject, levels={100: subject.levels[100]})
    opened = exported(kind, whole, tmp_path / "programs", PLAN)
    assert said(open_program(tmp_path / "programs") if kind == "stablehlo" else opened) == one_by_one
