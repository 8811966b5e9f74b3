import dataclasses
import json
import os

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.elastic.profile import DeviceProfile, Energy, load_profile, save_profile

PROFILE = DeviceProfile(
    levels=(50, 100),
    tokens=(16, 64),
    chunk_tokens=(16, 64),
    ttft_ms=((1.0, 4.0), (2.0, 8.0)),
    tpot_ms=((0.5, 0.6), (1.0, 1.2)),
)


def test_times_between_lengths_are_those_of_whole_chunks():
    assert PROFILE.ttft(100, 16) == PROFILE.ttft(100, 3) == 2.0
    # Seventeen tokens take two chunks of 16, each with a pass of 24: 80, between 40 and the 88 of one of 64.
    assert PROFILE.ttft(100, 17) == PROFILE.ttft(100, 32) == pytest.approx(2.0 + 6.0 * 40 / 48)
    assert PROFILE.ttft(50, 64) == 4.0
    assert PROFILE.tpot(100, 40) == pytest.approx(1.1)


def test_longer_prompts_than_measured_go_straight_on():
    assert PROFILE.ttft(50, 128) == pytest.approx(4.0 + 88 * 3.0 / 48)
    one = dataclasses.replace(PROFILE, tokens=(16,), ttft_ms=((1.0,), (2.0,)), tpot_ms=((1.0,), (1.0,)))
    assert one.ttft(50, 100) == 1.0


def test_times_at_hand_are_those_that_are_worked_out(monkeypatch):
    levels, lengths = (100, 50), [*range(70), 200]
    near = [(PROFILE.ttfts(levels, (each,)), PROFILE.tpots(levels, (each,))) for each in lengths]
    monkeypatch.setattr("jaxllm.serving.elastic.profile._LISTED_TOKENS", 0)
    far = dataclasses.replace(PROFILE)
    np.testing.assert_array_equal(np.hstack([each for each, _ in near]), far.ttfts(levels, lengths))
    np.testing.assert_array_equal(np.hstack([each for _, each in near]), far.tpots(levels, lengths))


def test_energy():
    with pytest.raises(ConfigError, match="has no energy"):
        PROFILE.joules(50, 10, 5)
    known = dataclasses.replace(PROFILE, energy=Energy(prefill_joules=(1.0, 2.0), decode_joules=(3.0, 5.0)))
    assert known.joules(100, 10, 5) == 45.0
    assert DeviceProfile.from_json(json.loads(json.dumps(known.to_json()))) == known


def test_a_level_that_was_not_measured():
    with pytest.raises(ConfigError, match="level 70 was not profiled; there are 50, 100"):
        PROFILE.ttft(70, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"levels": (100, 50)}, "levels of a device profile must be ascending"),
        ({"tokens": ()}, "tokens of a device profile"),
        ({"chunk_tokens": (0, 16)}, "chunk_tokens of a device profile"),
        ({"chunk_tokens": (1, 1 << 19)}, "lie too far apart"),
        ({"tokens": (16, 10**400)}, "tokens of a device profile must be ascending, at most"),
        ({"tokens": tuple(range(1, 5000))}, "tokens of a device profile"),
        ({"ttft_ms": ((1.0, 2.0),)}, "ttft_ms of a device profile must be 2 x 2"),
        ({"tpot_ms": ((1.0, float("nan")), (1.0, 1.0))}, "tpot_ms"),
        ({"tpot_ms": ((1.0, 0.0), (1.0, 1.0))}, "numbers above 0"),
        ({"ttft_ms": ((10**400, 1.0), (1.0, 1.0))}, "ttft_ms"),
        ({"energy": Energy(prefill_joules=(1.0,), decode_joules=(1.0, 1.0))}, "prefill_joules"),
    ],
)
def test_impossible_profiles_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(PROFILE, **change)


def test_profiles_are_kept_and_damaged_ones_refused(tmp_path):
    path = tmp_path / "profiles" / "some.json"
    assert load_profile(path) is None
    save_profile(PROFILE, path)
    assert load_profile(path) == PROFILE
    whole = path.read_bytes()
    other = whole.replace(b"0.5", b"0.6")
    assert other != whole
    for raw in (
        b"{",
        b"[]",
        b'{"levels": 3}',
        b" " * (1 << 21),
        other,
        json.dumps(PROFILE.to_json()).encode(),
    ):
        path.write_bytes(raw)
        with pytest.raises(ConfigError, match=r"some\.json.*measure again"):
            load_profile(path)


def test_a_profile_that_others_could_have_written_is_not_used(tmp_path):
    path = tmp_path / "profiles" / "some.json"
    save_profile(PROFILE, path)
    assert (path.parent.stat().st_mode | path.stat().st_mode) & 0o077 == 0
    for place, mode in ((path, 0o602), (path.parent, 0o777)):
        before = place.stat().st_mode
        place.chmod(mode)
        with pytest.raises(ConfigError, match="others may write to it"):
            load_profile(path)
        place.chmod(before)
    assert load_profile(path) == PROFILE
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_profile(path)


def test_a_profile_keeps_what_an_earlier_one_knows_besides():
    energy = Energy(prefill_joules=(1.0, 2.0), decode_joules=(3.0, 5.0))
    known = dataclasses.replace(PROFILE, energy=energy)
    again = dataclasses.replace(PROFILE, ttft_ms=((1.5, 4.5), (2.5, 8.5)))
    assert again.beside(known) == dataclasses.replace(again, energy=energy)
    assert again.beside(None) == again
    other = dataclasses.replace(
        PROFILE, levels=(70, 100), ttft_ms=((1.6, 5.0), (2.2, 8.2)), tpot_ms=((0.8, 0.9), (1.1, 1.3))
    )
    merged = other.beside(known)
    assert (merged.levels, merged.energy) == ((50, 70, 100), None)
    assert merged.ttft_ms == ((1.0, 4.0), (1.6, 5.0), (2.2, 8.2))
    # Of other lengths nothing can be taken.
    assert other.beside(dataclasses.replace(PROFILE, tokens=(16, 32))) == other
