"""Adapters in PEFT's layout: what we write PEFT loads, what PEFT writes we read, and the logits agree."""

import dataclasses
import json
import typing
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints.huggingface import read_config, read_params, write_folder
from jaxllm.checkpoints.peft import (
    CONFIG_FILE,
    INERT_KEYS,
    PLAIN_INITS,
    PLAIN_VALUES,
    READ_KEYS,
    WEIGHTS_FILE,
    find_adapter,
    read_adapter,
    write_adapter,
)
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models import decoder
from jaxllm.models.lora import LoraConfig, adapt, merge
from jaxllm.text import child_process
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


def random_peft(folder, config):
    """A model with an adapter of PEFT whose factors are random."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    with tiny_hf.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(tiny_hf.load(folder), config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "lora_" in name:
                value.copy_(0.2 * torch.randn(value.shape, generator=generator))
    return made


def test_a_packaged_adapter_is_found_by_its_name_unless_a_folder_has_it(tmp_path, monkeypatch):
    packaged = find_adapter("functions")
    assert {each.name for each in packaged.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}
    assert find_adapter("absent") == Path("absent")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "functions").mkdir()
    assert find_adapter("functions") == Path("functions")


def test_peft_loads_what_we_write(model, tmp_path):
    peft = pytest.importorskip("peft")
    folder, cfg, params = model
    stabilized = cfg.model_type in ("qwen3", "gpt2")
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
    folder, cfg, params = model
    names = {"gpt2": ["c_attn", "c_fc", "mlp.c_proj"], "phi3": ["qkv_proj", "down_proj"]}
    targets = names.get(cfg.model_type, ["q_proj", "v_proj", "fc1" if cfg.model_type == "opt" else "up_proj"])
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, rank_pattern={targets[0]: 2}, alpha_pattern={targets[0]: 9}
    )
    theirs = random_peft(folder, config)
    theirs.save_pretrained(tmp_path)
    lora, adapter = read_adapter(tmp_path, cfg)
    assert (lora.rank, lora.alpha) == (4, 6)
    found = our_logits(cfg, params, adapter, lora.scaling)
    np.testing.assert_allclose(found, tiny_hf.logits(theirs, TOKENS), atol=2e-3)
    plain = our_logits(cfg, params, {}, 1.0)
    assert np.abs(found - plain).mean() > 0.05 * plain.std()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_hf.save("llama-untied-biases", tmp_path_factory.mktemp("llama"))


def their_adapter(folder, to, change=None, **keys):
    """An adapter with random factors that PEFT writes, and all weights as PEFT merges it after reading it."""
    peft = pytest.importorskip("peft")
    with tiny_hf.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = {name: value.numpy().copy() for name, value in tiny_hf.load(folder).state_dict().items()}
        random_peft(folder, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **keys})).save_pretrained(to)
        if change:
            config = json.loads((to / CONFIG_FILE).read_text())
            (to / CONFIG_FILE).write_text(json.dumps(config | change))
        merged = peft.PeftModel.from_pretrained(tiny_hf.load(folder), to).merge_and_unload()
    return base, {name: value.numpy() for name, value in merged.state_dict().items()}


def assert_merged_alike(folder, adapter_folder, base, merged, tmp_path):
    """Our merged weights are theirs, and the adapter changes them far more than the tolerance."""
    cfg = read_config(folder)
    lora, adapter = read_adapter(adapter_folder, cfg)
    ours = merge(
        {name: jnp.asarray(value) for name, value in read_params(folder, cfg)}, adapter, lora.scaling
    )
    write_folder(tmp_path / "merged", cfg, {name: np.asarray(value) for name, value in ours.items()})
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    changed = 0.0
    for name, value in stored.items():
        np.testing.assert_allclose(value, merged[name], atol=2e-5, err_msg=name)
        changed = max(changed, np.abs(merged[name] - base[name]).max())
    assert changed > 0.1


@pytest.mark.parametrize(
    "keys",
    [
        {"alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 64, "q_proj": 3}},
        # The dot of a key is any character, and the first key that matches counts.
        {"alpha_pattern": {"layers.0.self.attn.v_proj": 64, "v_proj": 3, ".*": 2}},
        {"rank_pattern": {r"layers\.\d+\.self_attn\.(q|k)_proj": 2}, "alpha_pattern": {".*q.*": 20}},
        {"rank_pattern": {".*v_proj": 9}, "use_rslora": True, "alpha_pattern": {".*q_proj": 20}},
        {"target_modules": r".*layers\.1\.(self_attn\.[qk]_proj|mlp\.up_proj)"},
        {"layers_to_transform": [1]},
        {"exclude_modules": r".*layers\.0.*"},
        {"init_lora_weights": "gaussian", "use_rslora": True, "lora_dropout": 0.1},
    ],
    ids=str,
)
def test_adapters_of_peft_change_weights_as_peft_changes_them(llama, tmp_path, keys):
    keys = {"target_modules": ["q_proj", "v_proj"], **keys}
    base, merged = their_adapter(llama, tmp_path / "adapter", **keys)
    assert_merged_alike(llama, tmp_path / "adapter", base, merged, tmp_path)


def test_peft_reads_ranks_of_our_matrices_that_differ_by_layer(tmp_path):
    """One tensor has q, k and v: layers with more of them adapted have a higher rank."""
    peft = pytest.importorskip("peft")
    folder = tiny_hf.save("phi3", tmp_path / "phi3")
    cfg, lora = read_config(folder), LoraConfig(rank=2, alpha=5, targets=("attn.q", "attn.v"))
    adapter = random_adapter(cfg, lora)
    adapter = {name: value for name, value in adapter.items() if not name.startswith("layers.1.attn.v")}
    write_adapter(tmp_path / "adapter", cfg, lora, adapter)
    with tiny_hf.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = {name: value.numpy().copy() for name, value in tiny_hf.load(folder).state_dict().items()}
        merged = peft.PeftModel.from_pretrained(tiny_hf.load(folder), tmp_path / "adapter").merge_and_unload()
    merged = {name: value.numpy() for name, value in merged.state_dict().items()}
    assert_merged_alike(folder, tmp_path / "adapter", base, merged, tmp_path)


def test_every_key_of_peft_is_judged():
    """Fails when a new PEFT has a key, or a way to initialize, that nobody has judged."""
    peft = pytest.importorskip("peft")
    keys = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert keys <= READ_KEYS | INERT_KEYS | PLAIN_VALUES.keys()
    literals = typing.get_args(
        typing.get_args(typing.get_type_hints(peft.LoraConfig)["init_lora_weights"])[1]
    )
    changes_the_base = {"olora", "pissa", "pissa_niter_[number of iters]", "corda", "loftq"}
    assert {each for each in PLAIN_INITS if isinstance(each, str)} | changes_the_base == set(literals)


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
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"use_future": True}, "unknown key 'use_future'"),
        ({"rank_pattern": {"(": 3}}, "no regular expression"),
        ({"target_modules": "(a+)+$"}, "does not select"),
        ({"use_dora": True}, "use_dora' is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": "8"}, "rank of an adapter"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern of an adapter must be an object"),
        ({"alpha_pattern": {"q_proj": 1e39}}, "alpha must be"),
    ],
)
def test_other_adapters_are_refused_by_name(tmp_path, change, message):
    write_adapter(tmp_path, TINY, LORA, random_adapter(TINY, LORA))
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, **change}))
    with pytest.raises((ConfigError, CheckpointError), match=message):
        read_adapter(tmp_path, TINY)


def test_an_expression_without_end_is_stopped_and_keys_without_effect_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(child_process, "_LIMIT_S", 1.0)
    write_adapter(tmp_path, TINY, LORA, random_adapter(TINY, LORA))
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    more = {"task_type": None, "use_future": False, "future_config": None, "eva_config": {"rho": 2.0}}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | more))
    assert read_adapter(tmp_path, TINY)[0].rank == LORA.rank
    more = {"alpha_pattern": {r"([a-z_0-9.]+)+!": 3}}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | more))
    with pytest.raises(ConfigError, match="takes longer than 1 seconds"):
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
    rewritten({**weights, first: np.zeros((0, weights[first].shape[1]), np.float32)}, "no factor")
    rewritten({**weights, first: np.full_like(weights[first], np.nan)}, "NaN or infinite")
    rewritten({**weights, "base_model.model.x.lora_A.weight": np.zeros((2, 2), np.float32)}, "model lacks")
    raw = (tmp_path / WEIGHTS_FILE).read_bytes()
    (tmp_path / WEIGHTS_FILE).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        read_adapter(tmp_path, TINY)
    (tmp_path / WEIGHTS_FILE).unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="only as pickles"):
        read_adapter(tmp_path, TINY)
    with pytest.raises(ConfigError, match="rank 0"):
        write_adapter(tmp_path, TINY, LoraConfig(rank=0), {})
