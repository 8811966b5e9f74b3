"""Runs the steps of programs jitted in this process, to compare exported ones with."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.folder_format.parts import ProgramLevel
from jaxllm.export.folder_format.signature import Signature, level_signatures
from jaxllm.export.programs.jax_programs import JaxPrograms
from jaxllm.export.steps.exported import Step, StepOptions, step_of
from jaxllm.models.parameters import Params


class LiveExecutor(JaxPrograms):
    """Runs the signatures of an export over parameters in memory, in any format, with this process's kernels.

    Args:
      name: display name of the model.
      params: parameters of the sub-models, by level.
      cfgs: configs of the sub-models, by level; 100 among them.
      context_tokens: length of the longest caches.
      chunk_tokens, verify_tokens: lengths of prefill chunks and sizes of trees.
      block_tokens: maximum number of tokens that a program decodes; 0 for one.
      cache_tokens: lengths of shorter caches.

    Activations and caches are float32.
    """

    def __init__(
        self,
        name: str,
        params: Mapping[int, Params],
        cfgs: Mapping[int, ModelConfig],
        *,
        context_tokens: int,
        chunk_tokens: Sequence[int],
        verify_tokens: Sequence[int] = (),
        block_tokens: int = 0,
        cache_tokens: Sequence[int] = (),
    ) -> None:
        signatures = tuple(
            signature
            for level in cfgs
            for signature in level_signatures(
                level,
                chunk_tokens=chunk_tokens,
                verify_tokens=verify_tokens,
                block_tokens=block_tokens,
                cache_tokens=cache_tokens,
            )
        )
        manifest = Manifest(
            format="live",
            name=name,
            model="",
            context_tokens=context_tokens,
            precision="f32",
            cache_dtype="float32",
            platforms=(jax.default_backend(),),
            levels={level: ProgramLevel(cfg=cfg, weights={}) for level, cfg in cfgs.items()},
            signatures=signatures,
            files={},
            made_with={},
        )
        weights = {level: dict(each) for level, each in params.items()}

        def step(signature: Signature) -> Step:
            return step_of(signature, StepOptions(cfgs[signature.level], jnp.dtype(jnp.float32)))

        super().__init__(manifest, weights, step, lambda each: each.name, None)
