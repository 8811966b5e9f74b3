"""A service with contexts that the tests of this room share."""

import contextlib
from collections.abc import Iterator

import httpx
import pytest

from jaxllm.errors import ContextGone
from jaxllm.serving.server.limits import Limits
from tests.serving.server.context_service import ContextService, open_tiny


@pytest.fixture(scope="session")
def context_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContextService]:
    folder = tmp_path_factory.mktemp("contexts")
    with ContextService(open_tiny(folder), folder).serving() as made:
        yield made


@pytest.fixture
def served(context_service: ContextService) -> Iterator[ContextService]:
    """The service, whose app `mail` has no contexts afterwards."""
    yield context_service
    context_service.backend.limiter.limits = Limits()
    with contextlib.suppress(ContextGone):
        for each in context_service.client("mail").contexts():
            each.delete()


@pytest.fixture
def http(served: ContextService) -> httpx.Client:
    """A client of the app `mail`."""
    return served.http("mail")
