"""Adapters of encoder-decoders: learnt from pairs over a bundle as it is, and used by an engine."""

import json

import pytest

from jaxllm import Engine
from jaxllm.checkpoints.peft import read_adapter
from jaxllm.errors import ConfigError
from jaxllm.models.lora import LoraConfig
from jaxllm.prepare import prepare
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.training.data.sources import Source
from jaxllm.training.lora.run import LoraRecipe, dry_run_lora, train_lora
from tests.training.seq2seq.tiny import SWITCH, T5, tiny_recipe, write_random_folder
from tests.training.tiny_runs import quiet

RECIPE = LoraRecipe(
    steps=8, batch=4, row_tokens=32, peak_learning_rate=2e-2, warmup_steps=0, checkpoint_steps=4, log_steps=4,
    lora=LoraConfig(rank=2, alpha=4), held_out_share=0.2,
    sources=(
        Source(pairs=("one.txt", "two.txt")),
        Source(pairs=("two.txt", "one.txt"), prefix="word to number:"),
    ),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "weights"), [(SWITCH, "int8"), pytest.param(T5, "f32", marks=pytest.mark.campaign)]
)
def test_an_adapter_learns_on_both_sides(pairs_data, tmp_path, family, weights):
    bundle = tmp_path / "model.jaxllm"
    prepare(write_random_folder(tmp_path / "hf", pairs_data, family), bundle, weights=weights)
    folder = train_lora(RECIPE, bundle, quiet(tmp_path / "run", pairs_data))
    losses = json.loads((tmp_path / "run" / "summary.json").read_text())["held_out"]
    assert losses["with"] < losses["without"] - 0.1
    # PEFT makes another class of model of it.
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] == "SEQ_2_SEQ_LM"
    _, adapter = read_adapter(folder, tiny_recipe(family).cfg)
    assert {name.split(".")[0] for name in adapter} == {"encoder", "layers"}
    options = EngineOptions(chunk_tokens=(16,), decode_block=4, context_tokens=48, adapter_rank=2)
    engine = Engine.open(bundle, options=options)
    before = engine.generate("number to word: 123").tokens
    engine.set_adapter(folder)
    assert engine.generate("number to word: 123").tokens != before
    engine.close()


def test_estimates_are_refused(pairs_data, tmp_path):
    folder = write_random_folder(tmp_path / "hf", pairs_data)
    with pytest.raises(ConfigError, match="estimates of training: not for encoder-decoders yet"):
        dry_run_lora(RECIPE, folder, device="H100")
