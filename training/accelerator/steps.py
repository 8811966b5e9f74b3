"""Measures steps of training: tokens per second, share of the device's peak (MFU), peak memory."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.elastic.ladder import Ladder
from jaxllm.models.scanned_layers import Remat
from training.accelerator.rows import Row
from training.accelerator.subjects import Size, dense_params, four_bit_params, random_batch, size_of
from training.accelerator.timing import median_s
from training.data.sources import Source
from training.elastic.importance import unit_step
from training.elastic.job import joint_job
from training.loop.hardware import known_device, peak_memory_bytes, step_flops_per_token
from training.loop.parallel import MeshShape, make_mesh, place_rows, stacks_layers
from training.loop.trainer import Job, Trainer
from training.lora.job import lora_job
from training.lora.recipe import LoraRecipe
from training.pretrain.job import pretrain_job
from training.pretrain.recipe import PretrainRecipe
from training.settings import TrainSettings

# Before the measured ones; the first compiles.
_WARM_STEPS = 2


def measure_pretraining(name: str, remat: Remat, optimizer: str, repetitions: int) -> list[Row]:
    """Steps of a new model, all weights trained."""
    size = size_of(name)
    settings: Any = {**_settings(size, remat), "optimizer": optimizer}
    recipe = PretrainRecipe(**settings, model=size.cfg)
    return _trained(
        f"pretrain {name} {optimizer} remat={remat}", size, recipe, pretrain_job(recipe), repetitions
    )


def measure_lora(name: str, weights: str, repetitions: int) -> list[Row]:
    """Steps of an adapter of rank 16 over random weights of bfloat16 or 4 bits."""
    size = size_of(name)
    recipe = LoraRecipe(**_settings(size, "full"), sources=(Source(text="text.txt"),))
    stack = _stacks()
    if weights == "int4":
        frozen = four_bit_params(size.cfg, stack=stack)
    else:
        frozen = dense_params(size.cfg, jnp.bfloat16, stack=stack)
    job = lora_job(size.cfg, frozen, recipe)
    del frozen
    return _trained(f"lora {name} over {weights}", size, recipe, job, repetitions)


def measure_importance(name: str, repetitions: int) -> list[Row]:
    """The backward pass that importance of units is read from."""
    size, mesh = size_of(name), _mesh()
    params = dense_params(size.cfg, jnp.bfloat16, stack=_stacks())
    step = unit_step(size.cfg, mesh, remat="full")
    with jax.set_mesh(mesh):
        rows = jax.tree.map(lambda part: part[0], place_rows(random_batch(size), mesh, 1))
        took_s = median_s(lambda: step(params, rows), repetitions, warm_steps=_WARM_STEPS)
    return _rows(f"importance {name}", size, took_s, step_flops_per_token(size.cfg, size.row_tokens))


def measure_joint(name: str, bound: bool, repetitions: int) -> list[Row]:
    """Steps of joint recovery of all levels, with `bound` within reach of the model before."""
    size = size_of(name)
    settings = TrainSettings(**_settings(size, "full"))
    params = dense_params(size.cfg, jnp.float32, stack=_stacks())
    original = dense_params(size.cfg, jnp.bfloat16, stack=_stacks()) if bound else None
    job = joint_job(size.cfg, params, Ladder(), settings, original=original)
    del params, original
    case = f"joint recovery {name}" + (" with --whole-kl" if bound else "")
    return _trained(case, size, settings, job, repetitions)


def _settings(size: Size, remat: Remat) -> dict[str, Any]:
    return {
        "steps": 1000, "batch": size.batch, "row_tokens": size.row_tokens, "peak_learning_rate": 1e-4,
        "warmup_steps": 10, "precision": "bfloat16", "remat": remat,
    }  # fmt: skip


def _mesh() -> jax.sharding.Mesh:
    return make_mesh(MeshShape(data=1), 1)


def _stacks() -> bool:
    return stacks_layers(_mesh())


def _trained(case: str, size: Size, settings: TrainSettings, job: Job, repetitions: int) -> list[Row]:
    trainer = Trainer(job, settings, _mesh())
    batch, states = random_batch(size), [trainer.initial()]

    def step() -> Any:
        # The state is donated: the next step starts from what this one returns.
        state, measures = trainer.step(states.pop(), batch)
        states.append(state)
        return measures

    took_s = median_s(step, repetitions, warm_steps=_WARM_STEPS)
    rows = _rows(case, size, took_s, job.flops_per_token)
    return [*rows, Row(case, "build_ms", trainer.compile_s * 1e3, "ms")]


def _rows(case: str, size: Size, took_s: float, flops_per_token: float | None) -> list[Row]:
    tokens_per_s = size.batch * size.row_tokens / took_s
    rows = [
        Row(case, "train_tokens_per_s", tokens_per_s, "tokens/s"),
        Row(case, "peak_memory_bytes", peak_memory_bytes(), "bytes"),
    ]
    device = known_device(jax.devices()[0].device_kind)
    if device is not None and flops_per_token is not None:
        rows.append(Row(case, "mfu", tokens_per_s * flops_per_token / device.flops, "share"))
    return rows
