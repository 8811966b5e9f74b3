"""The services that this room's tests share: one with contexts and adapters over HTTP, and a plain one."""

import contextlib
from collections.abc import Iterator

import httpx
import openai
import pytest

from jaxllm import EngineOptions
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.errors import ContextGone
from jaxllm.models.lora import LoraConfig
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.limits import Limits
from jaxllm.serving.server.service import LLMService
from jaxllm.serving.server.service_options import ServerOptions
from tests.models.test_lora import random_adapter
from tests.serving.server.services import ContextService, make_executor, open_tiny
from tests.tiny import TINY, write_tiny_bundle

RANKS = {"formal": 4, "terse": 2, "other": 4}


@pytest.fixture(scope="session")
def context_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContextService]:
    """With the adapters `formal` and `terse`, and a folder that has `other`, too."""
    folder = tmp_path_factory.mktemp("contexts")
    for seed, (name, rank) in enumerate(RANKS.items()):
        lora = LoraConfig(rank=rank, alpha=16)
        write_adapter(folder / "adapters" / name, TINY, lora, random_adapter(TINY, lora, seed))
    given = {name: folder / "adapters" / name for name in ("formal", "terse")}
    options = ServerOptions(adapter=given, adapters=folder / "adapters", adapter_count=3)
    with ContextService(open_tiny(folder, adapter_rank=4), folder, options).serving() as made:
        yield made


@pytest.fixture
def served(context_service: ContextService) -> Iterator[ContextService]:
    """The service without an adapter in use, whose app `mail` has no contexts afterwards."""
    context_service.without_adapter()
    yield context_service
    context_service.backend.limiter.limits = Limits()
    with contextlib.suppress(ContextGone):
        for each in context_service.client("mail").contexts():
            each.delete()


@pytest.fixture
def http(served: ContextService) -> httpx.Client:
    """A client of the app `mail`."""
    return served.http("mail")


@pytest.fixture
def openai_client(served: ContextService) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the app `mail`."""
    with openai.OpenAI(api_key=served.keys["mail"], base_url=f"{served.url}/v1", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def plain_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMService]:
    """For executors that each test makes itself. It has contexts, which executors are told of or not."""
    folder = tmp_path_factory.mktemp("plain")
    options = EngineOptions(
        context_tokens=128, cache_tokens=(64, 128), chunk_tokens=(16,), decode_block=4, buckets_bytes=0
    )
    path = write_tiny_bundle(folder / "tiny.jaxllm")
    with contextlib.closing(
        LLMService.open(path, options=options, contexts=ContextOptions(folder=folder / "contexts"))
    ) as made:
        yield made


@pytest.fixture
def backend(plain_service: LLMService) -> Iterator[Backend]:
    """Of the plain service, with an executor that runs."""
    made, executor = Backend(), make_executor(plain_service)
    executor.start()
    made.opened(executor)
    yield made
    executor.stop(0)
    made.close()
