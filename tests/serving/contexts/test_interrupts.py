"""Interrupts at every line of a call, errors of every file operation: contexts go on from before or after."""

import errno
import gc
import os
from pathlib import Path

import pytest

from jaxllm.contexts.codecs import RAW
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.serving.contexts.store import ContextStore
from tests.faults import FailingDevice
from tests.interrupting import Interrupt, run_apart
from tests.serving.contexts.interrupts import DEEDS, FILES, Victim, nobody_to_tell, places

ROOT = Path(__file__).parents[3]
# Of each deed; 0 for all of them, which takes a quarter of an hour.
PLACES = int(os.environ.get("JAXLLM_TEST_PLACES", "8"))


def test_interrupts_come_in_files_that_exist():
    assert [file for file in FILES if not Path(f"{ROOT}{file}").exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("deed", DEEDS)
def test_an_interrupt_leaves_a_context_before_a_call_or_after_it(kept, deed):
    """It comes out as the interrupt, and whoever is next is answered at once."""
    size = kept()._chunk_io[100].chunk_bytes(RAW)
    # A call evicts what another context has.
    contexts = kept(budget_bytes=9 * size)
    victim = Victim(contexts)
    with Interrupt(FILES, None) as whole:
        DEEDS[deed](contexts, victim.context)
    victim.check(deed, told=False)
    victim.delete()
    # What was there before is not looked at for garbage at each place.
    gc.freeze()
    with nobody_to_tell():
        for place in places(whole.lines, PLACES):
            victim = Victim(contexts)
            came = False
            with Interrupt(FILES, place) as interrupt:
                try:
                    run_apart(lambda: DEEDS[deed](contexts, victim.context))  # noqa: B023
                except KeyboardInterrupt:
                    came = True
            assert came == interrupt.told, interrupt.where
            try:
                victim.check(deed)
            except Exception as error:
                raise AssertionError(f"after an interrupt at {interrupt.where}") from error
            victim.delete()
    gc.unfreeze()
    contexts.close()
    with pytest.raises(ConfigError, match="was closed"):
        contexts.create("mail")
    with ContextStore(contexts.store.root) as store:
        assert store.verify() == []
        assert store.records() == []


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("deed", ["say", "slide", "pin", "create", "delete"])
def test_a_failing_device_loses_nothing_and_is_told(kept, deed, error):
    contexts = kept()
    victim, root = Victim(contexts), contexts.store.root
    with FailingDevice(root, None, error=error) as whole:
        DEEDS[deed](contexts, victim.context)
        contexts.store.wait()
    for place in places(whole.operations, PLACES):
        victim = Victim(contexts)
        told = False
        with FailingDevice(root, place, error=error) as device:
            try:
                DEEDS[deed](contexts, victim.context)
            except JaxllmError:
                told = True
            contexts.store.wait()
        try:
            victim.check(deed, told=told)
        except Exception as failure:
            raise AssertionError(f"after {errno.errorcode[error]} of {device.hit}") from failure
        victim.delete()
