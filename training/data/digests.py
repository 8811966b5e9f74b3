"""Names models by their contents, so that a run knows whether it resumes with the same one."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import xxhash


def model_digest(config: Any, *params: Mapping[str, Any]) -> str:
    """A hexadecimal name for a model and its extra arrays.

    Args:
      config: a frozen dataclass, or JSON made of such. A field that has its default counts for nothing, so
        one that is added to the class later changes no name.
      params: dicts of arrays by name, in whatever form weights are stored.
    """
    digest = xxhash.xxh3_128(json.dumps(config, sort_keys=True, default=_chosen).encode())
    for each in params:
        for name in sorted(each):
            digest.update(name.encode())
            for part in jax.tree.leaves(each[name]):
                digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def digesting(
    tensors: Iterable[tuple[str, np.ndarray]], digests: dict[str, str]
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors as they come, whose digests go into `digests` by name."""
    for name, value in tensors:
        whole = np.ascontiguousarray(value)
        digests[name] = xxhash.xxh3_128_hexdigest(whole.reshape(-1).view(np.uint8).data)
        yield name, value


def _chosen(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    values = ((field, getattr(config, field.name)) for field in dataclasses.fields(config))
    return {field.name: value for field, value in values if value != field.default}
