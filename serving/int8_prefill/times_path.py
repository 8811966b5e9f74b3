"""Finds the file of the times of a bundle's subgraphs."""

from pathlib import Path

from jaxllm.bundle import Bundle
from jaxllm.kernels import native
from jaxllm.serving.buckets.store import compiled_options, digest_of, environment_facts
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.user_cache import cache_folder


def times_path(bundle: Bundle, options: EngineOptions) -> Path:
    """Path of the times of a bundle's subgraphs on this machine with these resolved options."""
    how = options.prefill
    facts = [
        bundle.fingerprint,
        [native.kernels().name, native.threads()],
        environment_facts(),
        compiled_options(options),
        [how.integer_device, how.integer_bytes],
    ]
    return cache_folder() / "profiles" / f"{digest_of(facts)[:32]}.subgraphs.json"
