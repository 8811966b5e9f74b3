"""A service with contexts that the tests of this room share."""

from collections.abc import Iterator

import pytest

from tests.serving.server.context_service import ContextService, open_tiny


@pytest.fixture(scope="session")
def context_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContextService]:
    folder = tmp_path_factory.mktemp("contexts")
    with ContextService(open_tiny(folder), folder).serving() as made:
        yield made
