"""Changes what calls use, where none uses it now: deletes contexts, adds and removes adapters. All is for
the engine's thread (`Executor.work`)."""

from jaxllm.errors import BudgetExceeded
from serving.server.calls import AdapterBusy
from serving.server.executor import Executor
from serving.server.facts import AdapterFacts
from serving.server.job import require_free
from serving.weights.adapters import LoadedAdapter


def delete_context(executor: Executor, app: str, name: str) -> None:
    """Deletes a context of an app.

    Raises:
      ContextGone: the app has no such context.
      ContextBusy: a call in it has not ended.
      ConfigError: the service keeps no contexts.
    """
    require_free(executor.jobs(), app, name)
    executor.kept().delete(app, name)


def add_adapter(executor: Executor, name: str, loaded: LoadedAdapter) -> AdapterFacts:
    """Lets calls name an adapter that was read.

    Raises:
      BudgetExceeded: the process has no memory for it; or see `Adapters.add`.
      ConfigError, AdapterBusy: see `Adapters.add`.
    """
    if executor.memory.short:
        raise BudgetExceeded("the service has no memory for an adapter; give it more (--memory)")
    return executor.adapters.add(name, loaded)


def remove_adapter(executor: Executor, name: str) -> None:
    """Forgets an adapter, and the caches of ended answers that were computed with it.

    Raises:
      AdapterGone: there is none of this name.
      AdapterBusy: calls with it have not ended.
    """
    executor.adapters.require(name)
    using = sum(job.adapter == name for job in executor.jobs())
    if using:
        raise AdapterBusy(f"{using} calls use the adapter {name!r:.80}; wait for their end")
    executor.sessions.forget(executor.adapters.unload(name).versions)
