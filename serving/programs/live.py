"""The steps of programs, jitted where they are: what exported ones are measured against."""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.models.parameters import Params
from jaxllm.programs.manifest import Manifest, ProgramLevel, Signature
from jaxllm.programs.steps import run_step, run_tree
from serving.programs.graphs import JaxPrograms


class LiveExecutor(JaxPrograms):
    """The same signatures as an export's, of parameters in memory in any form, with this process's kernels.

    Args:
      name: the model's, for people.
      params: by level, parameters of the sub-model.
      cfgs: by level; 100 among them.
      context_tokens: room of the caches.
      chunk_tokens, verify_tokens: lengths of prefill chunks and sizes of trees.
      dtype: of activations and caches.
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
        dtype: str = "float32",
    ) -> None:
        sizes = [
            *(("prefill", each) for each in chunk_tokens),
            ("decode", 1),
            *(("verify", each) for each in verify_tokens),
        ]
        signatures = tuple(
            Signature(kind=kind, tokens=tokens, level=level, file="")
            for level in cfgs
            for kind, tokens in sizes
        )
        manifest = Manifest(
            format="live",
            name=name,
            model="",
            context_tokens=context_tokens,
            precision="f32" if dtype == "float32" else "bf16",
            cache_dtype=dtype,
            platforms=(jax.default_backend(),),
            levels={level: ProgramLevel(cfg=cfg, weights={}) for level, cfg in cfgs.items()},
            signatures=signatures,
            files={},
            made_with={},
        )
        weights = {level: dict(each) for level, each in params.items()}
        super().__init__(manifest, weights, functools.partial(_step, manifest), lambda each: each.name, None)


def _step(manifest: Manifest, signature: Signature):
    cfg, dtype = manifest.levels[signature.level].cfg, jnp.dtype(manifest.cache_dtype)
    if signature.kind == "verify":
        return functools.partial(run_tree, cfg=cfg, dtype=dtype)
    return functools.partial(run_step, cfg=cfg, dtype=dtype, with_logits=signature.kind == "decode")
