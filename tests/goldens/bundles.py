"""The tiny models of which goldens are kept, each written when it is first asked for."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from jaxllm.bundle import Part, WeightFormat
from jaxllm.bundle.calibrations import expert_parts, prefill_parts
from jaxllm.bundle.levels import Recovery, elastic_parts
from jaxllm.bundle.tiny_lm import TinyLm, tiny_lm_parts
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.elastic.slo import marks
from jaxllm.experts.prediction import count_paths, count_tokens
from jaxllm.models.lora import LoraConfig
from jaxllm.models.parameters import param_specs
from jaxllm.models.tiny_lm import TlmConfig, init_tlm
from jaxllm.prepare import prepare
from tests.int8_prefill.calibrated import calibrated, outlying
from tests.models.test_lora import random_adapter
from tests.tiny import TINY, tiny_params, write_tiny_bundle
from tests.tiny_tlm import ENCODER

LADDER = Ladder(levels=(20, 50, 100))
_DATA = Path(os.environ.get("JAXLLM_DATA", Path(__file__).parents[3] / "shared" / "data"))
SMOLLM2 = _DATA / "models" / "smollm2-135m-instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
# Layers of two kinds.
CFG = dataclasses.replace(TINY, heads=8, kv_heads=4, ffn_size=192, attention_windows=(0, 24))
# So many that some can be read while others are in memory.
DEEP = dataclasses.replace(CFG, layers=4, attention_windows=(0, 24, 0, 24))
DRAFT = dataclasses.replace(CFG, layers=1, attention_windows=())
MIXTURE = dataclasses.replace(
    TINY, model_type="qwen3_moe", qk_norm=True, experts=6, experts_per_token=2,
    expert_ffn_size=256, sparse_layers=(True, True),
)  # fmt: skip
_RECOVERED = LoraConfig(rank=2, targets=("attn.q", "ffn.down"))


def sharp(cfg: ModelConfig) -> dict[str, np.ndarray]:
    """Parameters of a model that is surer of its answers than a fresh one, so that no token hangs on the last
    bit, and whose first layer says most, so that it can draft."""
    scales = {name: 3.0 if value.ndim > 1 else 1.0 for name, value in tiny_params(cfg).items()}
    for name in scales:
        if name.endswith(("attn.o", "ffn.down")) and not name.startswith("layers.0."):
            scales[name] = 0.75
    return {name: value * np.float32(scales[name]) for name, value in tiny_params(cfg).items()}


def _elastic_parts(cfg: ModelConfig) -> Mapping[str, Part]:
    adapter = random_adapter(sub_config(cfg, LADDER, 50), _RECOVERED)
    return elastic_parts(LADDER, {50: Recovery(adapter, 0.5)})


def _tiny_lm() -> TinyLm:
    """A tiny LM for the levels, drawn without JAX, which would compile each of its draws."""
    ratios = (0.4, 0.7, 1.0)
    cfg = TlmConfig(encoder=ENCODER, shared_layers=1, levels=len(LADDER.levels), prompt_levels=len(ratios))
    shapes = jax.eval_shape(lambda: init_tlm(cfg, jax.random.key(0)))
    draw = np.random.default_rng(0)
    params = {
        name: draw.normal(0, 0.3, each.shape).astype(np.float32) for name, each in sorted(shapes.items())
    }
    return TinyLm(
        cfg=cfg,
        params=params,
        levels=LADDER.levels,
        prompt_ratios=ratios,
        mark_ids=tuple(range(len(marks()))),
        row_tokens=ENCODER.window_tokens,
    )


class Bundles:
    """Bundles and adapters in a folder, written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _write(self, name: str, weights: WeightFormat, cfg: ModelConfig, **more: object) -> Path:
        path, more = self.folder / f"{name}.jaxllm", {"params": sharp(cfg), **more}
        return path if path.exists() else write_tiny_bundle(path, weights, cfg=cfg, **more)  # type: ignore[arg-type]

    def elastic(self, weights: WeightFormat) -> Path:
        """With levels 20, 50 and 100, of which 50 has an adapter of its own, and with a tiny LM."""
        parts = {**_elastic_parts(CFG), **tiny_lm_parts(_tiny_lm())}
        return self._write(f"elastic-{weights}", weights, CFG, parts=parts)

    def deep(self, weights: WeightFormat) -> Path:
        """The same with more layers."""
        return self._write(f"deep-{weights}", weights, DEEP, parts=_elastic_parts(DEEP))

    def draft(self, of: Literal["elastic", "deep"]) -> Path:
        """The first layer of a model, right now and then."""
        cfg = CFG if of == "elastic" else DEEP
        whole = sharp(cfg)
        params = {name: whole[name] for name in param_specs(DRAFT)}
        return self._write(f"draft-{of}", "int8", DRAFT, params=params)

    def shallow(self) -> Path:
        """Of one layer, to be exported."""
        return self._write("shallow", "f32", DRAFT, parts=_elastic_parts(DRAFT))

    def mixture(self, weights: WeightFormat) -> Path:
        """With experts of 2, 4 and 8 bits, stored separately."""
        draw = np.random.default_rng(0)
        bits = draw.choice([2, 4, 8], (sum(MIXTURE.sparse_layers), MIXTURE.experts))
        every = np.tile(np.arange(MIXTURE.experts), (len(bits), 200, 1))
        ids = draw.permuted(every, axis=-1)[..., : MIXTURE.experts_per_token]
        tokens = count_tokens(ids, np.arange(200) % MIXTURE.vocab_size, MIXTURE.experts)
        parts = expert_parts(count_paths(ids, MIXTURE.experts), tokens=tokens)
        return self._write(f"mixture-{weights}", weights, MIXTURE, parts=parts, expert_bits=bits)

    def calibrated(self) -> Path:
        """With outliers, and a shadow in one of two layers."""
        return self._write("calibrated", "int8", TINY, params=outlying(), parts=prefill_parts(calibrated()))

    def smollm2(self, weights: WeightFormat) -> Path:
        """SmolLM2-135M-Instruct, with a level of half of its units as they come."""
        path = self.folder / f"smollm2-{weights}.jaxllm"
        if not path.exists():
            prepare(SMOLLM2, path, weights=weights, parts=elastic_parts(Ladder(levels=(50, 100))))
        return path

    def adapter(self, seed: int) -> Path:
        """A low-rank adapter of `elastic`."""
        lora = LoraConfig(rank=4, alpha=16) if seed == 0 else _RECOVERED
        folder = self.folder / f"adapter-{seed}"
        if not folder.exists():
            write_adapter(folder, CFG, lora, random_adapter(CFG, lora, seed))
        return folder
