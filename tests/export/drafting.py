"""Checks drafted answers of programs, for every runtime."""

import numpy as np

from jaxllm.export.programs.drafts import make_drafts
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.speculation.costs import DraftTimes
from jaxllm.serving.speculation.drafter import Drafter
from jaxllm.speculation.token_tree import grown, root_alone
from tests.export.models import CONFIG, CONTEXT, PROMPTS

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
    engine.speculation = make_drafts(engine.runner, engine.tokenizer, options, threads=1)
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
