"""Runs our engine, as the service does and with one dispatch per token.

A decode block runs several tokens on the device before the host sees them; `one token per dispatch` is the
loop that engines without on-device sampling run.

Runs exported programs in the loop of `jaxllm generate --program`, and the same steps jitted live, whose
difference is the cost of exporting. The `model` of their opening is a folder of programs, or for the live
steps a bundle.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np

from benchmarks.peers.peer import Opening, Progress, Session
from jaxllm.bundle import WeightFormat
from jaxllm.export.programs.model import open_program
from jaxllm.kernels import native
from jaxllm.models.parameters import parameter_count
from jaxllm.sampling import Sampling, sampler_state
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.text_stream import MAX_STOP_IDS
from jaxllm.serving.runners.runner import BatchRow, prefill_prompt
from jaxllm.serving.runners.scorer import Scorer

BLOCKS, ONE_TOKEN = "blocks of tokens", "one token per dispatch"
_NO_STOP = np.full(MAX_STOP_IDS, -1, np.int32)


def _fed(runner: Any, prompt: Sequence[int], sampling: Sampling | None = None) -> tuple[Any, Any, Any]:
    """The first token after a prompt, the cache and the sampler; greedy by default."""
    sampler = sampler_state(sampling or Sampling(), prompt, runner.cfg.vocab_size, 0)
    logits, cache = prefill_prompt(runner, runner.start(len(prompt)), prompt, 0)
    token, sampler = runner.sample(logits, sampler)
    return token, cache, sampler


class EngineSession:
    """An engine whose runner is called directly: prompt in, ids out."""

    settings = (BLOCKS, ONE_TOKEN)
    _token: Any
    _cache: Any
    _sampler: Any

    def __init__(self, opening: Opening, progress: Progress) -> None:
        from jaxllm.serving.opening.engine import Engine

        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in opening.options.items()
        }
        options = EngineOptions(**given)
        weights = cast(WeightFormat, opening.format) if opening.model.is_dir() else None
        self._engine = Engine.open(
            opening.model, weights=weights, options=options, warm_up=False, progress=progress
        )
        self._engine.warm_up(progress=progress)

    def facts(self) -> dict[str, Any]:
        """Times of opening, and the sizes of the weights."""
        engine = self._engine
        weight_bytes = engine.model.bundle.weight_bytes
        device = jax.devices()[0]
        memory = device.memory_stats() if device.platform != "cpu" else None
        return {
            "backend": jax.default_backend(),
            "load_ms": engine.model.load_ms,
            "build_ms": engine.runner.buckets.build_ms,
            "buckets": len(engine.runner.buckets.bucket_ms),
            "buckets_read": len(engine.runner.buckets.loaded),
            "weight_bytes": weight_bytes,
            "bits_per_weight": 8 * weight_bytes / parameter_count(engine.cfg),
            "step_bytes": engine.model.bundle.step_bytes,
            "device_bytes": (memory or {}).get("peak_bytes_in_use", 0),
            "context_tokens": engine.options.context_tokens,
        }

    def kernel_ms(self) -> float:
        """Time that this process has spent in native kernels."""
        return native.busy_ns() / 1e6

    def prefill(self, prompt: Sequence[int], setting: str) -> int:
        """See `Session.prefill`."""
        # As the service does for a prompt of this length: the cache grows when decoding needs it to.
        self._token, self._cache, self._sampler = _fed(self._engine.runner, prompt)
        self._length = len(prompt)
        return int(np.asarray(self._token)[0])

    def decode(self, tokens: int, setting: str) -> list[int]:
        """See `Session.decode`."""
        runner = self._engine.runner
        block = self._engine.options.decode_block if setting == BLOCKS else 1
        ids: list[int] = []
        while len(ids) < tokens:
            limit = min(block, tokens - len(ids))
            cache = runner.make_room(self._cache, self._length + limit)
            row = BatchRow(
                token=self._token, cache=cache, sampler=self._sampler, stop_ids=_NO_STOP, limit=limit
            )
            got = runner.decode(row)
            self._cache, self._sampler = got.cache, got.sampler
            self._token = np.array(got.tokens[-1:], np.int32)
            self._length += len(got.tokens)
            ids += got.tokens
        return ids

    def score(self, tokens: Sequence[int], targets: Sequence[int]) -> Sequence[float]:
        """See `Session.score`."""
        scorer = Scorer(self._engine.runner)
        scorer.prepare(len(tokens))
        return scorer.score(tokens, targets).tolist()


class NestedSession(EngineSession):
    """An engine for each draft: its own high planes, and the small model that `options` may name as `draft`.
    They name `answer_tokens`, of every answer, too."""

    def __init__(self, opening: Opening, progress: Progress) -> None:
        from jaxllm.serving.ground.speculation_options import SpeculationOptions
        from jaxllm.serving.opening.engine import Engine

        self._answer_tokens = int(opening.options["answer_tokens"])
        drafts = {"drafts of high planes": SpeculationOptions(drafter="nested")}
        if small := opening.options.get("draft"):
            drafts[f"drafts of {Path(small).stem}"] = SpeculationOptions(model=small)
        self._engines = {
            setting: Engine.open(
                opening.model,
                weights=cast(WeightFormat, opening.format),
                options=EngineOptions(context_tokens=opening.context_tokens),
                speculation=speculation,
                progress=progress,
            )
            for setting, speculation in drafts.items()
        }
        self.settings = tuple(drafts)
        self._engine = self._engines[self.settings[0]]

    def passes(self) -> int:
        """Verifications so far, and tokens that were decoded without one."""
        found = [each.speculation.counts for each in self._engines.values() if each.speculation is not None]
        return sum(counts.verifications + counts.plain_tokens for counts in found)

    def prefill(self, prompt: Sequence[int], setting: str) -> int:
        """See `Session.prefill`."""
        from jaxllm.serving.engine.request import GenerationConfig

        config = GenerationConfig(max_tokens=self._answer_tokens, ignore_eos=True)
        self._answer = self._engines[setting].stream(list(prompt), config)
        self._pieces = iter(self._answer)
        self._read(1)
        return self._answer.tokens[0]

    def decode(self, tokens: int, setting: str) -> list[int]:
        """See `Session.decode`."""
        self._read(1 + tokens)
        return self._answer.tokens[1 : 1 + tokens]

    def _read(self, count: int) -> None:
        while len(self._answer.tokens) < count and next(self._pieces, None) is not None:
            pass


PROGRAM_BLOCKS = "blocks of the programs"
# Settings of programs that are opened as a device opens them.
GREEDY, DRAWN = "greedy", "drawn"
# What `DRAWN` draws by: as apps usually do.
_DRAWN = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=1)


def open_programs(opening: Opening, progress: Progress) -> Session:
    """Opens programs of a folder, and gets them ready."""
    engine = open_program(opening.model, threads=opening.threads)
    engine.warm_up(progress=progress)
    return ProgramSession(engine)


def open_device_programs(opening: Opening, progress: Progress) -> Session:
    """Opens programs of a folder as a device opens them."""
    from jaxllm.export.device.opening import open_device

    del progress
    engine = open_device(opening.model, threads=opening.threads)
    return ProgramSession(engine, settings=(GREEDY, DRAWN))


def open_live_steps(opening: Opening, progress: Progress) -> Session:
    """Traces and jits the steps of programs from a bundle's weights as floats; `options` has the lengths that
    an export would be given."""
    import jax.numpy as jnp

    from jaxllm.bundle import Bundle
    from jaxllm.export.programs.live import LiveExecutor
    from jaxllm.export.programs.runner import ProgramRunner
    from jaxllm.kernels.native import without_native_kernels
    from jaxllm.quant import dequantize

    del progress
    began = time.perf_counter()
    with without_native_kernels(), Bundle.open(opening.model) as bundle:
        params = {name: dequantize(weight, jnp.float32) for name, weight in bundle.load().items()}
        cfg = bundle.cfg
    executor = LiveExecutor(
        "live steps", params, cfg, context_tokens=opening.context_tokens, **opening.options
    )
    loaded = time.perf_counter()
    with without_native_kernels(branches=True):
        for signature in executor.manifest.signatures:
            # One after the other: `without_native_kernels` does not apply to other threads.
            executor.compile(signature)
    # The copies from short caches into longer ones are left.
    executor.prepare(executor.manifest.signatures)
    model = SimpleNamespace(load_ms=1000 * (loaded - began), build_ms=1000 * (time.perf_counter() - loaded))
    return ProgramSession(SimpleNamespace(runner=ProgramRunner(executor), model=model))


class ProgramSession:
    """A runner of programs, called directly: that of `engine`, whose `model` has the times of opening."""

    _token: Any
    _cache: Any
    _sampler: Any

    def __init__(self, engine: Any, settings: Sequence[str] = (PROGRAM_BLOCKS,)) -> None:
        self._runner, self._model, self.settings = engine.runner, engine.model, settings

    def facts(self) -> dict[str, Any]:
        """Times of opening."""
        return {"load_ms": self._model.load_ms, "build_ms": self._model.build_ms}

    def prefill(self, prompt: Sequence[int], setting: str) -> int:
        """See `Session.prefill`."""
        sampling = _DRAWN if setting == DRAWN else Sampling()
        self._token, self._cache, self._sampler = _fed(self._runner, prompt, sampling)
        return int(self._token[0])

    def decode(self, tokens: int, setting: str) -> list[int]:
        """See `Session.decode`."""
        row = BatchRow(
            token=self._token, cache=self._cache, sampler=self._sampler, stop_ids=_NO_STOP, limit=tokens
        )
        got = self._runner.decode(row)
        self._cache, self._sampler = got.cache, got.sampler
        self._token = np.array(got.tokens[-1:], np.int32)
        return got.tokens

    def score(self, tokens: Sequence[int], targets: Sequence[int]) -> Sequence[float]:
        """See `Session.score`."""
        return self._runner.score(tokens, targets).tolist()
