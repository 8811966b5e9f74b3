"""Tests what the system is read to say of the pressure on memory."""

import pytest

from jaxllm.serving.host import pressure


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("some avg10=12.50 avg60=1.00 avg300=0.00 total=9\nfull avg10=3.00 avg60=0.00 total=2\n", 0.125),
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", 0.0),
        ("", None),
        ("full avg10=3.00", None),
    ],
)  # fmt: skip
def test_the_share_of_waiting_tasks(text, share):
    assert pressure.parsed(text) == share


def test_a_system_that_does_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(pressure, "_FILE", tmp_path / "memory")
    assert pressure.memory_pressure() is None
    (tmp_path / "memory").write_text("some avg10=40.00 avg60=0 avg300=0 total=1\n")
    assert pressure.memory_pressure() == 0.4
