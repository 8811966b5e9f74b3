"""Computes state layers by their definitions, token by token in float64."""

import jax
import numpy as np


def delta_rule(tokens, matrix):
    """Outputs and the matrix after them (see `jaxllm.nn.states.gated_delta_rule`)."""
    of = jax.tree.map(lambda each: np.asarray(each, np.float64), tokens)
    matrix, outs = np.asarray(matrix, np.float64), []
    for t in range(of.q.shape[1]):
        matrix = matrix * np.exp(of.log_decay[:, t])[..., None, None]
        error = of.v[:, t] - np.einsum("bnkv,bnk->bnv", matrix, of.k[:, t])
        matrix = matrix + of.k[:, t][..., None] * (error * of.correction[:, t][..., None])[..., None, :]
        outs.append(np.einsum("bnkv,bnk->bnv", matrix, of.q[:, t]))
    return np.stack(outs, 1), matrix


def convolution(x, before, kernel):
    """Outputs (see `jaxllm.nn.states.short_convolution`)."""
    x, before, kernel = (np.asarray(each, np.float64) for each in (x, before, kernel))
    inputs = np.concatenate([before, x], axis=1)
    return sum(inputs[:, tap : tap + x.shape[1]] * kernel[:, tap] for tap in range(kernel.shape[1]))
