"""Names the file of an engine's profile on this device."""

import dataclasses
import hashlib
import json
from pathlib import Path

from jaxllm.bundle import Bundle
from jaxllm.kernels import native
from jaxllm.serving.buckets.store import compiled_options, environment_facts
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.user_cache import cache_folder

_VERSION = 5


def profile_path(bundle: Bundle, options: EngineOptions) -> Path:
    """The path of the profile of a bundle on this device, with these resolved options."""
    facts = {
        "version": _VERSION,
        "kernels": [native.kernels().name, native.threads()],
        "environment": environment_facts(),
        "options": compiled_options(options),
        # The allowed loss changes no time.
        "prefill": dataclasses.asdict(options.prefill) | {"most_loss": None},
    }
    key = hashlib.sha256(json.dumps([bundle.fingerprint, facts], sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "profiles" / f"{key}.json"
