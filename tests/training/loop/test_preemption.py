"""SIGTERM saves a checkpoint, from which the same command ends with the same bits."""

import dataclasses
import os
import signal

import pytest

from tests.training.jobs import SMOKE, assert_same_bits, train
from training.loop.trainer import Preempted

RECIPE = dataclasses.replace(SMOKE, steps=6, checkpoint_steps=4, log_steps=1)


def test_sigterm_saves_and_the_run_goes_on_to_the_same_bits(tmp_path):
    expected = train(RECIPE, tmp_path / "whole")
    before = signal.getsignal(signal.SIGTERM)

    def terminate(progress):
        if progress.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted, match="after step 2 of 6, which is saved; the same command"):
        train(RECIPE, tmp_path / "run", terminate)
    assert signal.getsignal(signal.SIGTERM) == before
    seen = []
    assert_same_bits(train(RECIPE, tmp_path / "run", seen.append), expected)
    assert [each.step for each in seen] == [3, 4, 5, 6]


def test_a_checkpoint_without_a_held_out_loss_is_never_the_best(tmp_path):
    from jaxllm.errors import CheckpointError
    from training.loop.checkpoints import Checkpoints

    def terminate(progress):
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted):
        train(RECIPE, tmp_path, terminate)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoints.best()
