"""Every kind of decoder, for laws that all of them keep."""

import pytest

from jaxllm.config import ModelConfig
from tests.models.configs import CONFIGS


@pytest.fixture(params=CONFIGS)
def cfg(request: pytest.FixtureRequest) -> ModelConfig:
    """Each of the small decoders."""
    return CONFIGS[request.param]
