"""Lists the inputs of a program that decodes several tokens, besides the last token and its position:
stops, and the sampler's options and state.

    limit        [1] int32       maximum number of tokens, at least 1
    stop_ids     [STOP_IDS] int32    tokens that end the answer, padded with -1
    options      [6] float32     `OPTIONS`, in this order
    draw         [5] int32       top_k, penalized (0 or 1), drawn, and the two words of the seed as stored
    bias         [V] float32
    in_prompt    [1, V] bool
    counts       [1, V] int32    number of each token in the answer

They are few, because each argument costs as much as a layer of a small model. See
`jaxllm.sampling_state.SamplerState` for their meaning. A program reads `bias`, `in_prompt` and `counts`
only if `penalized`.
"""

import numpy as np

from jaxllm.sampling_state import NUMBERS, SamplerState

STOP_IDS = 16
OPTIONS = NUMBERS
TOP_K, PENALIZED, DRAWN, SEED = 0, 1, 2, slice(3, 5)
# Read only if a sampler penalizes.
PENALTIES = ("bias", "in_prompt", "counts")
# Results besides the caches: the tokens `[1, T]` int32, -1 after the last one, and their number `[1]` int32.
NEXT_TOKENS, COUNT = "next_tokens", "count"


def controls(sampler: SamplerState, stop_ids: np.ndarray, limit: int) -> dict[str, np.ndarray]:
    """The arrays for a request; `stop_ids` is `[STOP_IDS]` int32."""
    options = [np.float32(getattr(sampler, name)) for name in OPTIONS]
    numbers = [int(sampler.top_k), int(bool(sampler.penalized)), int(sampler.drawn)]
    seed = np.asarray(sampler.seed, np.uint32).view(np.int32)
    return {
        "limit": np.array([limit], np.int32),
        "stop_ids": np.asarray(stop_ids, np.int32),
        "options": np.array(options, np.float32),
        "draw": np.concatenate([np.array(numbers, np.int32), seed]),
        "bias": np.asarray(sampler.bias),
        "in_prompt": np.asarray(sampler.in_prompt),
        "counts": np.asarray(sampler.counts),
    }


def control_shapes(vocab_size: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and dtype of each array."""
    return {
        "limit": ((1,), np.int32),
        "stop_ids": ((STOP_IDS,), np.int32),
        "options": ((len(OPTIONS),), np.float32),
        "draw": ((SEED.stop,), np.int32),
        "bias": ((vocab_size,), np.float32),
        "in_prompt": ((1, vocab_size), np.bool_),
        "counts": ((1, vocab_size), np.int32),
    }
