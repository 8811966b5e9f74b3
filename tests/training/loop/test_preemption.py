"""SIGTERM and Ctrl-C save a checkpoint, from which the same command ends with the same bits."""

import dataclasses
import os
import signal

import pytest

from jaxllm.errors import CheckpointError
from jaxllm.training.loop.checkpoints import Checkpoints
from jaxllm.training.loop.trainer import Preempted
from tests.training.jobs import SMOKE, assert_same_bits, train

RECIPE = dataclasses.replace(SMOKE, steps=6, checkpoint_steps=4, log_steps=1)


@pytest.fixture(autouse=True)
def interrupts():
    """As in a terminal: a suite that runs in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The last state of a run that nobody stopped."""
    return train(RECIPE, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_saves_and_the_run_goes_on_to_the_same_bits(tmp_path, capfd, whole, number, name):
    before = signal.getsignal(number)

    def stop(progress):
        if progress.step == 1:
            os.kill(os.getpid(), number)

    with pytest.raises(Preempted, match=f"by {name} after step 2 of 6, which is saved; the same command"):
        train(RECIPE, tmp_path, stop)
    assert signal.getsignal(number) == before
    assert ("Ctrl-C again ends at once" in capfd.readouterr().err) == (number == signal.SIGINT)
    # A checkpoint without a held-out loss is never the best.
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoints.best()
    seen = []
    assert_same_bits(train(RECIPE, tmp_path, seen.append), whole)
    assert [each.step for each in seen] == [3, 4, 5, 6]


def test_a_second_interrupt_ends_at_once_and_an_ignored_one_stays_ignored(tmp_path):
    steps = []

    def interrupt(progress):
        steps.append(progress.step)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(RECIPE, tmp_path / "twice", interrupt)
    assert steps == [1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert int(train(RECIPE, tmp_path / "ignored", interrupt).step) == RECIPE.steps
