"""Energy as counters of processor packages tell it."""

import pytest

from benchmarks.measuring.energy import EnergyMeter


def package(folder, name, uj, kind="package-0"):
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    for file, text in (("name", kind), ("energy_uj", uj), ("max_energy_range_uj", 9_999_999)):
        (own / file).write_text(f"{text}\n")
    return own


def test_packages_count_and_counters_begin_anew(tmp_path):
    first = package(tmp_path, "intel-rapl:0", 1_000_000)
    second = package(tmp_path, "intel-rapl:1", 9_500_000)
    # A part of the first, and the whole platform.
    package(tmp_path, "intel-rapl:0:0", 5, "core")
    package(tmp_path, "intel-rapl:2", 5, "psys")
    meter = EnergyMeter.of_machine(tmp_path)
    assert meter is not None
    assert meter.joules() == 0
    (first / "energy_uj").write_text("3500000\n")
    (second / "energy_uj").write_text("500000\n")
    assert meter.joules() == pytest.approx(2.5 + 1.0)
    assert meter.joules() == 0


def test_there_is_no_meter_where_nothing_tells(tmp_path):
    assert EnergyMeter.of_machine(tmp_path / "missing") is None
    own = package(tmp_path, "intel-rapl:0", "")
    assert EnergyMeter.of_machine(tmp_path) is None
    (own / "energy_uj").unlink()
    assert EnergyMeter.of_machine(tmp_path) is None
