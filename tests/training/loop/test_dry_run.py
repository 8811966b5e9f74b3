"""Dry runs: figures from the compiled step and of the hardware, and what to change where memory is short."""

import dataclasses
import functools
import json
import re
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.elastic.ladder import Ladder
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import init_params, parameter_count
from jaxllm.models.scanned_layers import stacked
from jaxllm.training.calibration import ExpertWidthsRecipe
from jaxllm.training.data.sources import Source
from jaxllm.training.decoders import (
    LoraRecipe,
    PretrainRecipe,
    dry_run_lora,
    dry_run_pretrain,
    lora_job,
    pretrain_job,
)
from jaxllm.training.elastic.importance import unit_step
from jaxllm.training.elastic.job import ElasticRecipe, joint_job, level_counts, level_job
from jaxllm.training.elastic.run import dry_run_elastic
from jaxllm.training.experts.expert_widths import dry_run_experts
from jaxllm.training.loop.dry_run import Estimate, batch_shapes, placed_shapes
from jaxllm.training.loop.hardware import step_flops_per_token
from jaxllm.training.loop.parallel import MeshShape, make_mesh
from jaxllm.training.loop.trainer import Trainer
from tests.gpu_lowering import lowers_for_gpus  # noqa: F401
from tests.tiny import TINY, write_tiny_folder
from tests.training.tiny_runs import ONE, SMOKE

LORA = LoraRecipe(steps=10, batch=2, row_tokens=64, peak_learning_rate=1e-3, sources=(Source(text="a.txt"),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_a_new_model_needs_its_state_and_activations():
    found = dry_run_pretrain(SMOKE, mesh_shape=ONE, device="H100")
    parameters = 4 * 288 * 32
    # Parameters and two moments, in float32.
    assert 3 * parameters < found["state_bytes"] < found["memory_bytes"]
    assert (found["device"], found["devices"], found["advice"]) == ("NVIDIA H100", 1, "")
    assert found["device_hours"] == pytest.approx(found["step_s"] * SMOKE.steps / 3600)
    longer = dry_run_pretrain(dataclasses.replace(SMOKE, batch=64), mesh_shape=ONE, device="H100")
    assert longer["temporary_bytes"] > found["temporary_bytes"]
    assert longer["step_s"] == pytest.approx(16 * found["step_s"])


def test_what_is_not_known_is_said(folder):
    with pytest.raises(ConfigError, match="say with --dry-run which device"):
        dry_run_pretrain(SMOKE, mesh_shape=ONE)
    with pytest.raises(ConfigError, match="knows frozen weights of f32 and bf16, not int4"):
        dry_run_lora(LORA, folder, weights="int4", mesh_shape=ONE, device="H100")


def test_advice_follows_what_is_large():
    parts = {
        "device": "NVIDIA H100", "devices": 8, "device_memory_bytes": 80 * 2**30, "step_s": 1.0,
        "device_hours": 1.0,
    }  # fmt: skip

    def advice(state, temporary):
        sizes = {"state_bytes": state << 30, "temporary_bytes": temporary << 30}
        return Estimate(**parts, **sizes, memory_bytes=state + temporary << 30).advice(LORA)

    assert not advice(20, 50)
    assert "needs 100.0 GiB per device and NVIDIA H100 has 80.0: take a larger `accumulate`" in advice(20, 80)
    assert "more devices along fsdp or tensor" in advice(80, 20)


def test_an_elastic_run_is_estimated_by_stages(folder, tmp_path):
    # A dry run does not look for weights.
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    lora = dataclasses.replace(LORA, precision="float32")
    fields = dataclasses.asdict(lora) | {"sources": lora.sources, "lora": lora.lora}
    recipe = ElasticRecipe(**fields, levels=(50, 70, 100))

    def stages(**changes):
        changed = dataclasses.replace(recipe, **changes)
        return dry_run_elastic(changed, tmp_path, mesh_shape=ONE, device="H100")

    adapters = stages()
    assert list(adapters["stages"]) == ["importance", "adapters of levels"]
    hours = [each["device_hours"] for each in adapters["stages"].values()]
    assert adapters["device_hours"] == pytest.approx(sum(hours))
    one = dry_run_lora(lora, tmp_path, mesh_shape=ONE, device="H100")
    assert hours[1] == pytest.approx(2 * one["device_hours"])
    assert stages(recovery="none")["stages"] == {"importance": adapters["stages"]["importance"]}
    joint, bound = (stages(recovery="joint", whole_kl_nats=nats) for nats in (0.0, 0.1))
    states = [each["stages"]["joint recovery"]["state_bytes"] for each in (joint, bound)]
    # Parameters and two moments, and with a bound the original.
    own = adapters["stages"]["importance"]["state_bytes"]
    assert 2.9 * own < states[0] < 3.1 * own < 3.9 * own < states[1] < 4.1 * own


EIGHT_B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 5e5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
ESTIMATES = [
    ("elasticize", "--output", "none"),
    ("elasticize", "--output", "none", "--recovery", "lora", "--whole-kl", "0"),
    ("lora", "--weights", "bf16"),
]


def test_widths_of_experts_are_estimated(tmp_path):
    cfg = dataclasses.replace(
        TINY, model_type="qwen3_moe", qk_norm=True, experts=4, experts_per_token=2, expert_ffn_size=32,
        layers=2, attention_windows=(), sparse_layers=(True, True),
    )  # fmt: skip
    folder = write_tiny_folder(tmp_path / "mixture", cfg=cfg)
    found = dry_run_experts(ExpertWidthsRecipe(tokens=2048), folder, device="H100")
    assert (found["devices"], found["advice"]) == (1, "")
    assert found["state_bytes"] > 4 * parameter_count(cfg)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), [(each[0], each[1:]) for each in ESTIMATES])
def test_stages_of_8b_fit_eight_devices(name, words, tmp_path, shipped_compilations):
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_B))
    mesh = ["--cpu-devices", "8", "--mesh", "fsdp=8", "--dry-run", "H100", "--run", "none"]
    program = [sys.executable, "-m", "jaxllm.cli.entry", name, str(tmp_path), "--recipe", "large"]
    found = json.loads(subprocess.run([*program, *words, *mesh], check=True, capture_output=True).stdout)
    for each in found.get("stages", {"lora": found}).values():
        assert (each["devices"], each["advice"]) == (8, "")
        assert each["memory_bytes"] < 80e9


CFG = ModelConfig(
    model_type="llama", vocab_size=10, hidden_size=4, layers=2, heads=2, kv_heads=1, head_dim=2,
    ffn_size=6, window_tokens=8, norm_eps=1e-5, tied_head=False, rope=RopeConfig(dim=2, theta=1e4),
)  # fmt: skip


def test_operations_are_those_of_products_and_attention():
    layer = 4 * (4 + 2 + 2 + 4) + 3 * 6 * 4 + 2 * 4
    products = 2 * (2 * layer + 4 + 40)
    attention = 2 * 2 * 2 * 2 * 8
    assert step_flops_per_token(CFG, 8) == 3 * (products + attention)
    assert step_flops_per_token(CFG, 8, adapter=True) == 2 * products + 3 * attention
    tied = dataclasses.replace(CFG, tied_head=True)
    assert step_flops_per_token(tied, 8) == step_flops_per_token(CFG, 8)


# Steps at the size of Llama-3.1-8B, lowered for accelerators without one: little code, fused attention.


# Of JAX 0.12, see `jaxllm.kernels.fused_attention`.
no_warning = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
KERNELS = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}
MOST_OPERATIONS, MOST_S = 20_000, 10


def config(layers=32):
    return ModelConfig(
        model_type="llama", vocab_size=128256, hidden_size=4096, layers=layers, heads=32, kv_heads=8,
        head_dim=128, ffn_size=14336, window_tokens=131072, norm_eps=1e-5, tied_head=False,
        rope=RopeConfig(dim=128, theta=5e5),
    )  # fmt: skip


def lowered(kind, row_tokens, platform, precision="bfloat16"):
    """The text of a step with 8 rows, and the seconds that tracing and lowering took."""
    cfg, mesh = config(), make_mesh(MeshShape(data=1), 8)
    batch = batch_shapes(1, 8, row_tokens, mesh)
    half = jax.eval_shape(lambda: stacked(init_params(cfg, jax.random.key(0), jnp.bfloat16), cfg))
    half = placed_shapes(half, mesh)
    settings = {
        "steps": 4, "batch": 8, "row_tokens": row_tokens, "peak_learning_rate": 1e-4, "remat": "full",
        "precision": precision,
    }  # fmt: skip
    if kind in ("lora", "level"):
        made = LoraRecipe if kind == "lora" else functools.partial(ElasticRecipe, teacher_share=1.0)
        recipe = made(**settings, sources=(Source(text="text.txt"),))
    if kind == "lora":
        trainer, frozen = Trainer(lora_job(cfg, {}, recipe), recipe, mesh, stack=True), half
    elif kind == "level":
        job = dataclasses.replace(level_job(cfg, {}, Ladder(), recipe), frozen={})
        trainer = Trainer(job, recipe, mesh, stack=True)
        counts = stacked(level_counts(cfg, Ladder(), 50), cfg)
        frozen = half | placed_shapes(jax.eval_shape(lambda: counts), mesh)
    elif kind == "joint":
        recipe = PretrainRecipe(**settings, model=cfg)
        whole = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
        trainer = Trainer(joint_job(cfg, whole, Ladder(), recipe, original={}), recipe, mesh, stack=True)
        frozen = half
    elif kind in ("gradient", "fisher"):
        started = time.perf_counter()
        with jax.set_mesh(mesh):
            step = unit_step(cfg, mesh, remat="full", by=kind)
            own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)
            text = step.trace(half, own).lower(lowering_platforms=(platform,)).as_text()
        return text, time.perf_counter() - started
    else:
        recipe = PretrainRecipe(**settings, model=cfg, optimizer=kind)
        trainer, frozen = Trainer(pretrain_job(recipe), recipe, mesh, stack=True), None
    started = time.perf_counter()
    step = trainer.lower(frozen, batch, platform)
    return step.as_text(), time.perf_counter() - started


def check(text, row_tokens, platform):
    assert len(re.findall(r"^\s*%\S+ = |^\s*\S+ = \"?\w+\.", text, re.MULTILINE)) < MOST_OPERATIONS
    assert KERNELS[platform] in text
    assert f"8x{row_tokens}x128256x" not in text


@no_warning
@pytest.mark.usefixtures("lowers_for_gpus")
@pytest.mark.parametrize(("platform", "precision"), [("tpu", "bfloat16"), ("cuda", "float32")])
def test_a_step_of_32_layers_is_little_code(platform, precision):
    """In float32, too, for which this process's CPU has a kernel."""
    text, _ = lowered("lora", 512, platform, precision)
    check(text, 512, platform)


@no_warning
@pytest.mark.usefixtures("lowers_for_gpus")
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("kind", ["lora", "level", "joint", "gradient", "adamw", "muon"])
def test_steps_of_8b_lower_in_seconds(kind, platform):
    text, took_s = lowered(kind, 4096, platform)
    check(text, 4096, platform)
    assert took_s < MOST_S
