"""Whether a battery is being emptied, by what the system tells."""

import pytest

from serving.host.power import on_battery

EMPTIED = {"type": "Battery", "status": "Discharging"}
FULL = {"type": "Battery", "status": "Full"}


@pytest.mark.parametrize(
    ("supplies", "empties"),
    [
        ({}, False),
        ({"AC": {"type": "Mains", "online": "0"}, "BAT0": EMPTIED}, True),
        ({"AC": {"type": "Mains", "online": "1"}, "BAT0": {"type": "Battery", "status": "Charging"}}, False),
        ({"BAT0": FULL}, False),
        # Of two one is enough; a mouse's says nothing, and what cannot be read is nothing.
        ({"BAT0": FULL, "BAT1": EMPTIED}, True),
        ({"mouse": {**EMPTIED, "scope": "Device"}}, False),
        ({"odd": {"type": "\xff", "status": "Discharging"}, "empty": {}}, False),
    ],
)
def test_it_is_told_by_the_supplies(tmp_path, supplies, empties):
    for name, facts in supplies.items():
        (tmp_path / name).mkdir()
        for fact, value in facts.items():
            (tmp_path / name / fact).write_text(f"{value}\n", encoding="latin-1")
    assert on_battery(tmp_path) is empties


def test_other_systems_tell_nothing(tmp_path):
    assert not on_battery(tmp_path / "missing")
