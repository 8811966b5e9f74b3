"""kill -9 at random moments and file operations of one store's many lives: nothing older is lost, and no byte
is left over."""

import os
import random

import pytest

from tests.serving.contexts.killed import Told
from tests.serving.contexts.store_lives import live

# Of all lanes together. A thousand take minutes in memory (--basetemp=/dev/shm/kills), where a kill is the
# same.
KILLS, LANES = int(os.environ.get("JAXLLM_TEST_STORE_KILLS", "8")), 2


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("lane", range(LANES))
def test_a_store_outlives_kills(tmp_path, lane):
    draw, told = random.Random(lane), Told()
    for number in range(KILLS // LANES):
        live(told, tmp_path / "store", seed=100_000 * lane + number, after_s=draw.uniform(0.0, 0.3))
    print(f"{told.lives} kills, {told.deeds} calls and other deeds had ended, {told.checked} chunks compared")
    print(f"of the kills within {dict(told.within)}")


def test_a_store_outlives_kills_at_file_operations(tmp_path):
    told = Told()
    for at in range(1, 145, 3):
        live(told, tmp_path / "store", seed=at, at=at)
    assert told.lives == 48
    assert told.deeds > told.lives
    assert told.checked > told.lives
