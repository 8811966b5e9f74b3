"""A tiny random model of a family, as transformers has it and as each room has it."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm import Engine
from jaxllm.bundle.levels import elastic_parts
from jaxllm.checkpoints.huggingface import read_config, read_params, write_folder
from jaxllm.config import WHOLE, ModelConfig
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.models.features import room_refusal
from jaxllm.models.parameters import param_specs
from jaxllm.serving.buckets.model import DecodeBucket, SampleBucket
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.runners.runner import prefill_prompt
from tests import tiny, tiny_hf


def drawn(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(3, tiny.VOCAB_SIZE, count).tolist()


CONTEXT, CHUNK = 64, 16
OPTIONS = EngineOptions(
    context_tokens=CONTEXT, cache_tokens=(CONTEXT,), chunk_tokens=(CHUNK,), decode_block=4,
    cache_dtype="float32", buckets_bytes=0,
)  # fmt: skip
LEVEL = 50
LADDER = Ladder(levels=(LEVEL, WHOLE))
PROMPT, NEXT = drawn(23), drawn(4, seed=1)
# Families whose variant has another name.
_VARIANTS = {"gemma3_text": "gemma3"}
# Of Switch Transformers no token is dropped, which would depend on how many are fed together.
_CHANGED: Mapping[str, Mapping[str, Any]] = {"switch_transformers": {"expert_capacity": 64}}


class Family:
    """One family's tiny model.

    Attributes:
      name: its model_type.
      folder: where its files are.
      cfg, params: of the model, in float32.
      path: of a bundle of it, with the level `LEVEL` where it can have levels.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        variant = _VARIANTS.get(name, name)
        changed = dict(_CHANGED.get(name, {}))
        if variant in tiny_hf.ENCODER_DECODERS:
            checkpoint = tiny_hf.save_encoder_decoder(
                variant, folder / "hf", vocab_size=tiny.VOCAB_SIZE, **changed
            )
        else:
            keys = tiny_hf.VARIANTS[variant][1]
            sized = ("vocab_size", "vocab_size_per_layer_input")
            keys = {key: tiny.VOCAB_SIZE if key in sized else value for key, value in keys.items()}
            checkpoint = tiny_hf.save(variant, folder / "hf", keys=keys)
        self.cfg = read_config(checkpoint)
        self.params = {name: np.asarray(value) for name, value in read_params(checkpoint, self.cfg)}
        self._references = {"whole": self._load(checkpoint)}
        self._opened = contextlib.ExitStack()
        self.path = self.write("whole", parts=elastic_parts(LADDER))

    def close(self) -> None:
        """Closes the engines."""
        self._opened.close()

    def write(self, name: str, weights: Any = "f32", **how: Any) -> Path:
        """Writes a bundle of the model."""
        tokenizer = tiny.tiny_tokenizer()
        if self.cfg.encoder is not None:
            tokenizer = dataclasses.replace(tokenizer, start_ids=(tiny.BEGIN_ID,))
        how = {"params": self.params, **how}
        return tiny.write_tiny_bundle(
            self.folder / f"{name}.jaxllm", weights, cfg=self.cfg, tokenizer=tokenizer, **how
        )

    def open(self, path: Path | None = None, *, filled: int = WHOLE, **changed: Any) -> Engine:
        """An engine that can prefill at the level `filled`, which is all that `error` asks for; closed with
        the family."""
        options = dataclasses.replace(OPTIONS, **changed)
        engine = Engine.open(path or self.path, options=options, warm_up=False)
        self._opened.callback(engine.close)
        runner = engine.at(filled).runner
        wanted = runner.buckets_for(CONTEXT // 2, CONTEXT // 2)
        runner.fill([each for each in wanted if not isinstance(each, DecodeBucket | SampleBucket)])
        return engine

    @functools.cached_property
    def engine(self) -> Engine:
        """With all weights in memory, adapters and contexts, as far as there are some."""
        rank = 0 if room_refusal(self.cfg, "adapters") else 4
        codec = "" if room_refusal(self.cfg, "contexts") else "raw"
        return self.open(adapter_rank=rank, kv_codec=codec)

    # -- transformers ------------------------------------------------------------------------------

    def reference(self, name: str, params: Mapping[str, np.ndarray]) -> str:
        """Has transformers load the model with other parameters; returns the name to give `scores`."""
        if name not in self._references:
            folder = self.folder / f"hf-{name}"
            write_folder(folder, self.cfg, params)
            self._references[name] = self._load(folder)
        return name

    def level_reference(self, level: int) -> str:
        """`reference` of a level: the whole model, in which the units that it lacks are zeros."""
        return self.reference(f"level-{level}", zeroed(self.params, sub_config(self.cfg, LADDER, level)))

    def scores(self, tokens: Sequence[int], source: Sequence[int] = (), of: str = "whole") -> np.ndarray:
        """transformers' log-probabilities `[T, V]` float64 after each of `tokens`, in a decoder those behind
        the source's, if there is one."""
        import torch

        model, rows = self._references[of], np.asarray([tokens], np.int64)
        if self.cfg.encoder is None:
            logits = tiny_hf.logits(model, rows)[0]
        else:
            ids = torch.from_numpy(np.asarray([source], np.int64))
            with torch.no_grad():
                out = model(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    decoder_input_ids=torch.from_numpy(rows),
                    use_cache=False,
                )
            logits = out.logits.numpy()[0]
        logits = logits.astype(np.float64)
        return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

    def _load(self, folder: Path) -> Any:
        return tiny_hf.load(folder) if self.cfg.encoder is None else tiny_hf.load_encoder_decoder(folder)

    def error(self, engine: Engine, *, of: str = "whole") -> float:
        """How far an engine's log-probabilities are from transformers', at most: those behind `PROMPT`, and
        behind each of some further tokens, which are fed one by one. Of an encoder-decoder the prompt is the
        source."""
        runner = engine.runner
        tokens, source = (PROMPT, []) if self.cfg.encoder is None else ([tiny.BEGIN_ID], PROMPT)
        wanted = self.scores([*tokens, *NEXT], source, of)[len(tokens) - 1 :]
        # Logits near each other would agree with anything.
        assert wanted.std() > 0.2
        with runner.lock:
            cache = runner.start(CONTEXT)
            cache = runner.read_source(cache, source) if source else cache
            found, fed = [], tokens
            for count in range(len(NEXT) + 1):
                logits, cache = prefill_prompt(runner, cache, fed, len(tokens) + count - len(fed))
                found.append(np.asarray(logits, np.float64)[0])
                fed = NEXT[count : count + 1]
        rows = np.stack(found)
        return float(np.abs(rows - np.logaddexp.reduce(rows, axis=-1, keepdims=True) - wanted).max())


def zeroed(params: Mapping[str, np.ndarray], level: ModelConfig) -> dict[str, np.ndarray]:
    """Parameters of the whole model in which the units that a level lacks are zeros."""
    specs, found = param_specs(level), {}
    for name, value in params.items():
        kept = tuple(map(slice, specs[name].shape))
        found[name] = np.zeros_like(value)
        found[name][kept] = value[kept]
    return found
