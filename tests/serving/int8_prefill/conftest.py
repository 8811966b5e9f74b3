import pytest

from jaxllm.bundle.calibrations import prefill_parts
from tests.int8_prefill.calibrated import calibrated, outlying
from tests.tiny import write_tiny_bundle


@pytest.fixture(scope="session")
def calibrated_bundle(tmp_path_factory):
    """The tiny model with outliers at 8 bits, with a shadow in one of its two layers."""
    path = tmp_path_factory.mktemp("prefill") / "tiny.jaxllm"
    return write_tiny_bundle(path, "int8", params=outlying(), parts=prefill_parts(calibrated()))
