"""Registries by name, which other distributions extend by entry points.

    [project.entry-points."jaxllm.drafters"]        in the pyproject.toml of another distribution
    mine = "my_package.drafter:my_drafter"

Their metadata is read when a name is looked up that is not registered here.
"""

import functools
from typing import TypeVar

from jaxllm.errors import ConfigError, one_line

_Value = TypeVar("_Value")


class Registry(dict[str, _Value]):
    """Entries by name, extended by a group of entry points; iteration only has this distribution's entries.

    Args:
      group: group of entry points, such as "jaxllm.drafters".
      own: entries of this distribution, which cannot be replaced.
    """

    def __init__(self, group: str, own: dict[str, _Value]) -> None:
        super().__init__(own)
        self._group = group

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and is_added(self._group, name))

    def __missing__(self, name: str) -> _Value:
        """The entry of another distribution.

        Raises:
          KeyError: there is none.
          ConfigError: it cannot be imported.
        """
        if not is_added(self._group, name):
            raise KeyError(name)
        # Imported here: a start that knows all names need not wait for it.
        import importlib.metadata

        (entry, *_) = importlib.metadata.entry_points(group=self._group, name=name)
        try:
            return entry.load()
        except Exception as error:  # Whatever a foreign module raises when it is imported.
            distribution = "another distribution" if entry.dist is None else entry.dist.name
            raise ConfigError(
                f"{name!r}, which {distribution} adds to {self._group}, cannot be imported: {one_line(error)}"
            ) from error


@functools.lru_cache(maxsize=256)
def is_added(group: str, name: str) -> bool:
    """Whether a distribution adds an entry of this name to a group."""
    import importlib.metadata

    return bool(importlib.metadata.entry_points(group=group, name=name))
