"""Runs the steps of programs jitted in this process, to compare exported ones with."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.folder_format.parts import ProgramLevel
from jaxllm.export.folder_format.signature import Signature, level_signatures
from jaxllm.export.programs.jax_programs import JaxPrograms
from jaxllm.export.steps.exported import Step, StepOptions, step_of
from jaxllm.models.parameters import Params


class LiveExecutor(JaxPrograms):
    """Runs the signatures of an export over parameters in memory, in any format, with this process's kernels.
    Activations and caches are float32."""

    def __init__(
        self, name: str, params: Params, cfg: ModelConfig, *, context_tokens: int, **lengths: Any
    ) -> None:
        """Makes the programs of a model.

        Args:
          context_tokens: length of the longest caches.
          **lengths: see `level_signatures`.
        """
        manifest = Manifest(
            format="live",
            name=name,
            model="",
            context_tokens=context_tokens,
            precision="f32",
            cache_dtype="float32",
            platforms=(jax.default_backend(),),
            levels={FULL_LEVEL: ProgramLevel(cfg=cfg, weights={})},
            signatures=tuple(level_signatures(FULL_LEVEL, **lengths)),
            files={},
            made_with={},
        )
        super().__init__(manifest, {FULL_LEVEL: dict(params)})
        self._cfg = cfg

    def step(self, signature: Signature) -> Step:
        """See `JaxPrograms`."""
        return step_of(signature, StepOptions(self._cfg, jnp.dtype(jnp.float32)))

    def contents(self, signature: Signature) -> str:
        """See `JaxPrograms`."""
        return signature.name
