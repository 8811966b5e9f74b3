"""Operations and memory of a step by hand."""

import dataclasses
import json

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.training.loop.hardware import known_device, peak_memory_bytes, step_flops_per_token
from jaxllm.training.loop.trainer import Trainer
from jaxllm.training.pretrain.job import pretrain_job
from tests.training.jobs import SMOKE, held_out_of, one_device, train

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


def test_devices_are_known_by_their_kinds():
    assert known_device("cpu") is None
    lite, whole = known_device("TPU v5 lite"), known_device("TPU v5p")
    assert lite is not None
    assert whole is not None
    assert lite.flops < whole.flops
    assert known_device("NVIDIA H100 80GB HBM3") is not None


def test_records_have_memory_and_no_time_of_compiling(tmp_path):
    seen = []
    train(dataclasses.replace(SMOKE, steps=4, checkpoint_steps=4, log_steps=2), tmp_path, seen.append)
    first, last = seen
    assert first.compile_s > 0
    assert last.compile_s == 0
    assert first.utilization is None
    assert 0 < first.peak_memory_bytes <= peak_memory_bytes()
    assert json.dumps(dataclasses.asdict(last))


def test_batches_may_differ_in_their_shapes():
    trainer = Trainer(pretrain_job(SMOKE), SMOKE, one_device())
    state, seen = trainer.initial(), []
    for batch in (4, 8, 4):
        rows = next(iter(held_out_of(dataclasses.replace(SMOKE, batch=batch))()))
        state, _ = trainer.step(state, rows)
        seen.append(trainer.compile_s)
    assert seen[0] < seen[1] == seen[2]
