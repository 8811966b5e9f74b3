"""Whether answers are those of forward passes of the whole without a cache."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models import decoder


def follows_forward_passes(engine):
    """A check that each token of a sequence after a prompt of so many tokens has the highest logit but for
    rounding."""
    params = engine.model.bundle.load()

    @jax.jit
    def scores(params, tokens):
        hidden, _ = decoder.forward(params, tokens, cfg=engine.cfg)
        return decoder.logits(params, hidden, cfg=engine.cfg)[0]

    def check(sequence, prompt):
        row = np.zeros((1, engine.options.context_tokens), np.int32)
        row[0, : len(sequence)] = sequence
        found = np.asarray(scores(params, jnp.asarray(row)))
        for at in range(prompt, len(sequence)):
            before = found[at - 1]
            # Two kernels may round differently; another state gives other logits altogether.
            assert before[sequence[at]] > before.max() - 0.02 * before.std(), f"token {at}"

    return check
