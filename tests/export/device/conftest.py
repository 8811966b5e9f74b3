"""A tiny elastic model as programs, opened as a device opens them."""

import dataclasses
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from jaxllm.export.folder_format.manifest import LOOP, MAIN, Manifest, StoredFile
from jaxllm.export.folder_format.publisher import sign_folder

# A folder of TFLite programs, where JAX is not installed to make StableHLO ones (make test-device).
FOLDER_VARIABLE = "JAXLLM_TEST_DEVICE"


def pytest_configure(config):
    """Registers the marks of `tests.budgets`, which a device has not."""
    config.addinivalue_line("markers", "campaign: proves once more, for more cases, what the suite proves")


@pytest.fixture(scope="session")
def folder(request):
    if FOLDER_VARIABLE in os.environ:
        return Path(os.environ[FOLDER_VARIABLE])
    return request.getfixturevalue("stablehlo")


@pytest.fixture(scope="session")
def engine(folder):
    from jaxllm.export.device.opening import open_device

    return open_device(folder)


@pytest.fixture(scope="session")
def profile(engine):
    from jaxllm.serving.elastic.profiling import measure_coarsely

    return measure_coarsely(engine)


def updated(folder, place, *, sign=None, golden=None, release=0, **files):
    """A copy of a folder with other files, as an update of it; with a loop, of a device."""
    shutil.copytree(folder, place)
    manifest = Manifest.read(folder)
    for name in {LOOP, MAIN} - manifest.files.keys():
        files = {name: b"", **files}
    for name, raw in files.items():
        (place / name).write_bytes(raw)
    stored = {name: StoredFile.of(place / name) for name in files}
    changed = {"release": release, "golden": manifest.golden if golden is None else golden}
    dataclasses.replace(manifest, files={**manifest.files, **stored}, **changed).write(place)
    if sign is not None:
        sign_folder(place, sign)
    return place


def zipped(folder, path):
    """The zip file of a folder."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for each in folder.iterdir():
            file.write(each, f"{folder.name}/{each.name}")
    return path
