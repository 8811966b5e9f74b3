"""SIGTERM and Ctrl-C save a checkpoint, from which the same command ends with the same bits."""

import dataclasses
import os
import signal

import pytest

from jaxllm.training.loop.trainer import Preempted
from tests.training.jobs import SMOKE, assert_same_bits, train

RECIPE = dataclasses.replace(SMOKE, steps=6, checkpoint_steps=4, log_steps=1)


@pytest.fixture(autouse=True)
def interrupts():
    """As in a terminal: a suite that runs in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_saves_and_the_run_goes_on_to_the_same_bits(tmp_path, capfd, number, name):
    expected = train(RECIPE, tmp_path / "whole")
    before = signal.getsignal(number)

    def stop(progress):
        if progress.step == 1:
            os.kill(os.getpid(), number)

    with pytest.raises(Preempted, match=f"by {name} after step 2 of 6, which is saved; the same command"):
        train(RECIPE, tmp_path / "run", stop)
    assert signal.getsignal(number) == before
    assert ("Ctrl-C again ends at once" in capfd.readouterr().err) == (number == signal.SIGINT)
    seen = []
    assert_same_bits(train(RECIPE, tmp_path / "run", seen.append), expected)
    assert [each.step for each in seen] == [3, 4, 5, 6]


def test_a_second_interrupt_ends_at_once(tmp_path):
    steps = []

    def interrupt(progress):
        steps.append(progress.step)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(RECIPE, tmp_path, interrupt)
    assert steps == [1]


def test_an_ignored_interrupt_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        state = train(RECIPE, tmp_path, lambda progress: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert int(state.step) == RECIPE.steps


def test_a_checkpoint_without_a_held_out_loss_is_never_the_best(tmp_path):
    from jaxllm.errors import CheckpointError
    from jaxllm.training.loop.checkpoints import Checkpoints

    def terminate(progress):
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted):
        train(RECIPE, tmp_path, terminate)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoints.best()
