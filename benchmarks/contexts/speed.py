"""Compares the speed of answers in a context with that of an engine without contexts."""

import statistics

import numpy as np

from benchmarks.contexts.histories import random_tokens
from benchmarks.contexts.systems import OURS
from benchmarks.measuring.report import Row, compared
from serving.engine import Engine
from serving.request import GenerationConfig, Session

PLAIN = "no management"
# Shares of a window.
_PROMPT, _ANSWER = 1 / 4, 1 / 32


def speed_rows(managed: Engine, plain: Engine, repeats: int, seed: int) -> list[Row]:
    """Rates of prefill and decoding, in turns, of a prompt and of the next one behind it.

    Args:
      managed: an engine that keeps contexts: it counts attention, in caches that can be stored.
      plain: the same model without contexts.
      repeats: of each.
      seed: of the prompts.
    """
    draw, engines = np.random.default_rng(seed), {OURS: managed, PLAIN: plain}
    window = plain.options.context_tokens
    config = GenerationConfig(max_tokens=int(_ANSWER * window), ignore_eos=True)
    prefill, decode = {name: [] for name in engines}, {name: [] for name in engines}
    for repeat in range(repeats + 1):
        prompts = [random_tokens(plain, int(_PROMPT * window), draw) for _ in range(2)]
        for name in engines if repeat % 2 else reversed(list(engines)):
            session, said = Session(), []
            for prompt in prompts:
                said = [*said, *prompt]
                done = engines[name].stream(said, config, session=session).result()
                said += done.tokens
                if repeat:
                    # The first one warms up.
                    fed = done.prompt_tokens - done.reused_tokens
                    prefill[name].append(1000 * fed / done.timings.ttft_ms)
                    decode[name].append(1000 / done.timings.tpot_ms(len(done.tokens)))
    rows = []
    for metric, rates in (("prefill_tokens_per_s", prefill), ("decode_tokens_per_s", decode)):
        values = {name: statistics.median(each) for name, each in rates.items()}
        rows += compared(values, ours=OURS, case="answering in a context", metric=metric, unit="tokens/s")
    return rows
