"""Tells whether this machine runs on a battery."""

from pathlib import Path

_SUPPLIES = Path("/sys/class/power_supply")


def on_battery(supplies: Path = _SUPPLIES) -> bool:
    """Whether a battery of the system is being emptied. False where the system has none, or does not tell, as
    other systems than Linux.

    Args:
      supplies: a folder for each supply of power.
    """
    try:
        folders = list(supplies.iterdir())
    except OSError:
        return False
    return any(
        _fact(each, "type") == "Battery"
        # That of a mouse says nothing.
        and _fact(each, "scope") != "Device"
        and _fact(each, "status") == "Discharging"
        for each in folders
    )


def _fact(folder: Path, name: str) -> str:
    """A fact of a supply; empty where it is not told."""
    try:
        return (folder / name).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
