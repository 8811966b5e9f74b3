"""Packages that only exporting needs, found when they are needed."""

import importlib.util

from jaxllm.errors import ConfigError


def require_extra(extra: str, *modules: str) -> None:
    """Checks that the packages of an extra are installed.

    Raises:
      ConfigError: one is not; the message has the command that installs it.
    """
    missing = [name for name in modules if not _found(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; run "
            f"`pip install 'jaxllm[{extra}]'`, in an environment of its own (see README, Export)"
        )


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        # The package around it is missing.
        return False
