"""Makes executors of live services as the daemon does."""

from typing import Any

from jaxllm.serving.server.adapters import Adapters
from jaxllm.serving.server.executor import Executor
from jaxllm.serving.server.opening import service_memory
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.server.service import LLMService


def make_executor(service: LLMService, options: SchedulerOptions | None = None, **more: Any) -> Executor:
    """An executor with the service's memory and adapters, unless others are given; not started."""
    engine = service.engine
    engine.runner.fill([each for level in engine.levels for each in engine.runner_at(level).fork_buckets()])
    more.setdefault("memory", service_memory(service))
    more.setdefault("adapters", Adapters(service.engine.model))
    return Executor(service, options or SchedulerOptions(), **more)
