"""An environment of Python that has what a device has, and no JAX: its packages are links to those of the
environment that runs the tests, so that nothing is downloaded."""

import importlib.metadata
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

# What the guide installs on a device.
DEVICE = ("ai-edge-litert", "click", "jinja2", "numpy", "platformdirs", "tokenizers", "xxhash")
# What runs its tests.
TESTING = ("pytest", "pytest-timeout")


def bare_python(place: Path, packages: Iterable[str]) -> Path:
    """Makes an environment of these packages and what they require, without pip, and returns its Python.

    Raises:
      PackageNotFoundError: one of them is not installed here.
    """
    venv.create(place, symlinks=True)
    schemes = {"base": str(place), "platbase": str(place)}
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars=schemes))
    for name in _with_required(packages):
        there = importlib.metadata.distribution(name)
        assert there.files is not None
        tops = {file.parts[0] for file in there.files if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            # Namespaces belong to several packages.
            if not (site / top).is_symlink():
                (site / top).symlink_to(Path(str(there.locate_file(top))).resolve())
    return Path(sysconfig.get_path("scripts", scheme="venv", vars=schemes)) / "python"


def _with_required(packages: Iterable[str]) -> list[str]:
    """Names of packages, and of what pip would install with them."""
    found, left = [], list(packages)
    while left:
        name = left.pop()
        if name in found:
            continue
        found.append(name)
        for line in importlib.metadata.requires(name) or ():
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                left.append(wanted.name.lower())
    return found
