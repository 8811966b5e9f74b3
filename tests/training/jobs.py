"""A small job with something to learn, for tests of the loop."""

import copy
import dataclasses
import functools

import jax
import numpy as np

from jaxllm.training.data.corpus import TokenizedDocuments
from jaxllm.training.data.rows import PackedBatches, evaluation_batches
from jaxllm.training.loop import trainer as loop
from jaxllm.training.loop.parallel import MeshShape, make_mesh
from jaxllm.training.pretrain.run import PretrainRecipe, pretrain_job

SMOKE = PretrainRecipe.load("smoke")
# One layer: these tests spend their time on compilation.
SMOKE = dataclasses.replace(SMOKE, model=dataclasses.replace(SMOKE.model, layers=1, attention_windows=()))


def documents(count, first=0):
    """Documents in which each token follows from the one before."""
    lengths = 5 + (np.arange(first, first + count) * 13) % 40
    tokens = [(place + np.arange(length)) * 7 % 61 for place, length in enumerate(lengths, start=first)]
    nothing = np.zeros(count, np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenizedDocuments(np.concatenate(tokens).astype(np.uint16), starts, nothing, nothing, 0)


DOCUMENTS, HELD_OUT = documents(150), documents(10, first=1000)


def one_device():
    return make_mesh(MeshShape(data=1), 1)


def held_out_of(recipe):
    return functools.partial(evaluation_batches, HELD_OUT, recipe.row_tokens, recipe.batch)


def batches_of(recipe):
    return PackedBatches(DOCUMENTS, (), recipe.row_tokens, recipe.batch, recipe.seed)


@functools.cache
def _made(recipe):
    return loop.Trainer(pretrain_job(recipe), recipe, one_device())


def trainer_of(recipe):
    """A trainer of a recipe's model on one device, which shares what others of this process have compiled."""
    # Neither of these is part of a compiled step.
    trainer = copy.copy(_made(dataclasses.replace(recipe, log_steps=1, checkpoint_steps=1)))
    trainer.settings = recipe
    return trainer


def train(recipe, folder, report=lambda progress: None, *, trainer=None):
    """Trains a recipe's model on DOCUMENTS."""
    trainer = trainer or trainer_of(recipe)
    return loop.train(trainer, batches_of(recipe).batch_at, held_out_of(recipe), folder, report)


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
