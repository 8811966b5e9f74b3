"""Opens the model of a service and warms it up: nothing compiles afterwards."""

import contextlib
import dataclasses
import logging
from typing import NamedTuple

from jaxllm.bundle.images import has_image_encoder
from jaxllm.errors import BudgetExceeded, ConfigError
from serving.buckets.bucket import Bucket
from serving.bundles import open_model
from serving.engine import Engine
from serving.images.encoder import ImageEncoder
from serving.loading import LoadedModel
from serving.options import EngineOptions
from serving.planning.known_profile import known_profile
from serving.planning.safety_margin import SafetyMargin
from serving.server.adapters import Adapters, engine_shape
from serving.server.memory import engine_bytes
from serving.server.service_options import ServerOptions
from serving.service import LLMService, engine_options, planner_of
from serving.speculation.options import SpeculationOptions

_log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """A model that is open, and its adapters."""

    service: LLMService
    adapters: Adapters


def open_service(options: ServerOptions, speculation: SpeculationOptions | None = None) -> Opened:
    """Opens the model of a service and its adapters.

    Raises:
      JaxllmError: one cannot be opened.
    """
    contexts, stages = options.context_options(), _Stages()
    model = options.model or None
    adapters = engine_shape(options.adapter_options(), model, options.levels)
    memory = engine_bytes(options.memory)
    if memory and adapters.given_bytes >= memory:
        raise BudgetExceeded(
            f"a memory budget of {options.memory:,} bytes leaves no room for a model beside its adapters; "
            "give more"
        )
    image_bytes = _image_bytes(model) if options.images else 0
    if memory and adapters.given_bytes + image_bytes >= memory:
        raise BudgetExceeded(
            f"a memory budget of {options.memory:,} bytes leaves no room for a model beside its encoder of "
            "images; give more, or serve without images (images = false)"
        )
    asked = EngineOptions(
        context_tokens=options.context_tokens,
        memory_bytes=memory - adapters.given_bytes - image_bytes if memory else 0,
        prompt_rows=image_bytes > 0,
        batch_rows=options.batch_rows,
        adapter_rank=adapters.rank,
        adapter_targets=adapters.targets,
    )
    whole = engine_options(model, options.levels or None, asked, contexts)
    # It takes a codec, which is known now.
    whole = dataclasses.replace(whole, attend_coded=options.attend_coded)
    with contextlib.ExitStack() as opened:
        engine = Engine.open(model, options=whole, speculation=speculation, progress=stages)
        opened.callback(engine.close)
        _prepare(engine, stages, forks=bool(options.prefix_memory))
        profile = known_profile(engine, coarse=True, progress=stages)
        planner = planner_of(engine, profile, margin=SafetyMargin())
        service = LLMService.of_engine(engine, planner, profile, contexts)
        opened.callback(service.close)
        found = Opened(service, Adapters(engine.model, options.adapter_options()))
        opened.pop_all()
    return found


def _image_bytes(model: str | None) -> int:
    """Bytes of a model's encoder of images in memory; 0 where it has none."""
    with open_model(model) as bundle:
        encoder = ImageEncoder.of(bundle) if has_image_encoder(bundle) else None
        return 0 if encoder is None else encoder.size_bytes


def _prepare(engine: Engine[LoadedModel], stages: "_Stages", *, forks: bool) -> None:
    """Gets ready what answers by themselves do not need: embeddings, copies of caches, images."""
    buckets: list[Bucket] = []
    with contextlib.suppress(ConfigError):
        # Where weights are streamed, texts are not embedded, and who asks is told so.
        buckets += engine.runner.scorer().embedding_buckets()
    if forks:
        buckets += [each for level in engine.levels for each in engine.runner_at(level).fork_buckets()]
    engine.runner.fill(buckets, stages)
    if engine.options.prompt_rows and (encoder := engine.model.images) is not None:
        encoder.prepare()


class _Stages:
    """Logs the stages of opening a model."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            _log.info("opening the model: %s", stage)
