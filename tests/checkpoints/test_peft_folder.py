"""Adapters in PEFT's layout: what we write PEFT loads, what PEFT writes we read, and the logits agree."""

import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.checkpoints.peft_folder import CONFIG_FILE, WEIGHTS_FILE, read_adapter, write_adapter
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models import decoder
from jaxllm.models.lora import LoraConfig, adapt
from tests import tiny_hf
from tests.models.test_lora import MOE, random_adapter
from tests.quick_jit import jit
from tests.tiny import TINY

LORA = LoraConfig(rank=3, alpha=5, targets=("attn.q", "attn.v", "attn.o", "ffn.up", "ffn.down"))
TOKENS = np.random.default_rng(3).integers(0, tiny_hf.VOCAB, (2, 9)).astype(np.int32)
# One of each layout: plain, several in one tensor, stored input first.
LAYOUTS = ("llama-untied-biases", "qwen3", "phi3", "gpt2", "opt", "ernie4_5")


@pytest.fixture(scope="module", params=LAYOUTS)
def model(request, tmp_path_factory):
    folder = tiny_hf.save(request.param, tmp_path_factory.mktemp("model"))
    cfg = read_config(folder)
    return folder, cfg, {name: jnp.asarray(value) for name, value in read_params(folder, cfg)}


def our_logits(cfg, params, adapter, scaling):
    @jit
    def whole(params, adapter):
        adapted = adapt(params, adapter, scaling)
        return decoder.logits(adapted, decoder.forward_documents(adapted, TOKENS, cfg=cfg), cfg=cfg)

    return np.asarray(whole(params, {name: jnp.asarray(value) for name, value in adapter.items()}))


@pytest.mark.parametrize("stabilized", [False, True])
def test_peft_loads_what_we_write(model, tmp_path, stabilized):
    peft = pytest.importorskip("peft")
    folder, cfg, params = model
    lora = LoraConfig(rank=3, alpha=5, targets=LORA.targets, rank_stabilized=stabilized)
    adapter = random_adapter(cfg, lora)
    write_adapter(tmp_path, cfg, lora, adapter, base=str(folder))
    with tiny_hf.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(tiny_hf.load(folder), tmp_path).eval()
    plain = tiny_hf.logits(tiny_hf.load(folder), TOKENS)
    expected = tiny_hf.logits(theirs, TOKENS)
    assert np.abs(expected - plain).mean() > 0.05 * plain.std()
    np.testing.assert_allclose(our_logits(cfg, params, adapter, lora.scaling), expected, atol=2e-3)
    # Every factor arrived, and nothing is left at its initial value.
    stored = load_file(tmp_path / WEIGHTS_FILE)
    state = peft.get_peft_model_state_dict(theirs)
    assert state.keys() == stored.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(value.numpy(), stored[name])


def test_we_read_what_peft_writes(model, tmp_path):
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    folder, cfg, params = model
    names = {"gpt2": ["c_attn", "c_fc", "mlp.c_proj"], "phi3": ["qkv_proj", "down_proj"]}
    targets = names.get(cfg.model_type, ["q_proj", "v_proj", "fc1" if cfg.model_type == "opt" else "up_proj"])
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, rank_pattern={targets[0]: 2}, alpha_pattern={targets[0]: 9}
    )
    with tiny_hf.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(tiny_hf.load(folder), config).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, value in theirs.named_parameters():
                if "lora_" in name:
                    value.copy_(0.2 * torch.randn(value.shape, generator=generator))
        theirs.save_pretrained(tmp_path)
    lora, adapter = read_adapter(tmp_path, cfg)
    assert (lora.rank, lora.alpha) == (4, 6)
    found = our_logits(cfg, params, adapter, lora.scaling)
    np.testing.assert_allclose(found, tiny_hf.logits(theirs, TOKENS), atol=2e-3)
    plain = our_logits(cfg, params, {}, 1.0)
    assert np.abs(found - plain).mean() > 0.05 * plain.std()


@pytest.mark.parametrize("cfg", [TINY, MOE.__class__(**{**MOE.__dict__, "model_type": "mixtral"})], ids=str)
def test_a_round_trip_keeps_every_bit(cfg, tmp_path):
    targets = ("attn.q", "attn.o", "router", "experts.down", "experts.up") if cfg.experts else LORA.targets
    lora = LoraConfig(rank=2, alpha=4, targets=targets)
    adapter = random_adapter(cfg, lora)
    write_adapter(tmp_path, cfg, lora, adapter)
    again, read = read_adapter(tmp_path, cfg)
    assert (again.rank, again.alpha, set(again.targets)) == (lora.rank, lora.alpha, set(lora.targets))
    assert read.keys() == adapter.keys()
    for name, value in adapter.items():
        np.testing.assert_array_equal(read[name], value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "plain LoRA"),
        ({"use_dora": True}, "use_dora True"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": "8"}, "rank of an adapter"),
        ({"r": None}, "rank of an adapter"),
        ({"lora_alpha": None}, "alpha must be"),
        ({"lora_alpha": 10**400}, "alpha must be"),
        ({"lora_alpha": 1e308}, "alpha must be"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern of an adapter must be an object"),
        ({"alpha_pattern": {"q_proj": "4"}}, "alpha must be"),
        ({"alpha_pattern": {"q_proj": 1e39}}, "alpha must be"),
    ],
)
def test_other_adapters_are_refused_by_name(tmp_path, change, message):
    write_adapter(tmp_path, TINY, LORA, random_adapter(TINY, LORA))
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=message):
        read_adapter(tmp_path, TINY)


def test_damaged_and_foreign_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="save_pretrained"):
        read_adapter(tmp_path, TINY)
    write_adapter(tmp_path, TINY, LORA, random_adapter(TINY, LORA))
    weights = load_file(tmp_path / WEIGHTS_FILE)
    first = next(iter(weights))

    def rewritten(tensors, message):
        save_file(tensors, tmp_path / WEIGHTS_FILE)
        with pytest.raises(CheckpointError, match=message):
            read_adapter(tmp_path, TINY)

    rewritten({name: value for name, value in weights.items() if name != first}, "lacks one of")
    rewritten({**weights, first: np.zeros((3, 7), np.float32)}, "belongs to another model")
    rewritten({**weights, first: np.zeros((3, 7, 2), np.float32)}, "no factor")
    rewritten({**weights, first: np.zeros((5000, 5000), np.float32)}, "no factor")
    rewritten({**weights, first: np.zeros((0, weights[first].shape[1]), np.float32)}, "no factor")
    rewritten({**weights, first: np.full_like(weights[first], np.nan)}, "not finite")
    rewritten({**weights, first: np.full_like(weights[first], np.inf)}, "not finite")
    rewritten({**weights, "base_model.model.x.lora_A.weight": np.zeros((2, 2), np.float32)}, "model lacks")
    raw = (tmp_path / WEIGHTS_FILE).read_bytes()
    (tmp_path / WEIGHTS_FILE).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        read_adapter(tmp_path, TINY)
    (tmp_path / WEIGHTS_FILE).unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="never as pickles"):
        read_adapter(tmp_path, TINY)
    with pytest.raises(ConfigError, match="rank 0"):
        write_adapter(tmp_path, TINY, LoraConfig(rank=0), {})
