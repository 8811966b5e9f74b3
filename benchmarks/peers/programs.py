"""Runs exported programs in the loop of `jaxllm generate --program`, and the same steps jitted live, whose
difference is the cost of exporting.

The `model` of their opening is a folder of programs, or for the live steps a bundle.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.jaxllm_engine import Ours
from benchmarks.peers.peer import Opening, Progress, Session
from serving.runners.runner import prefill_prompt

PROGRAM_BLOCKS = "blocks of the programs"
# Settings of programs that are opened as a device opens them.
GREEDY, DRAWN = "greedy", "drawn"
# What `DRAWN` draws by: as apps usually do.
_DRAWN = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 1}


class Programs(Ours):
    """Programs of a folder."""

    name = "programs"

    def systems(self, weights: str) -> Mapping[str, str]:
        """None: `benchmarks.export` names them."""
        return {}

    def open(self, opening: Opening, progress: Progress) -> Session:
        """Opens a folder, and gets its programs ready."""
        from serving.engine import Engine

        engine = Engine.open_program(opening.model, threads=opening.threads)
        engine.warm_up(progress=progress)
        facts = {"load_ms": engine.model.load_ms, "build_ms": engine.model.build_ms}
        return ProgramSession(engine.runner, facts)


class DevicePrograms(Programs):
    """Programs of a folder, opened as a device opens them: what no program draws, NumPy does."""

    name = "device-programs"

    def open(self, opening: Opening, progress: Progress) -> Session:
        """Opens a folder, and gets its programs ready."""
        from serving.device.opening import open_device

        engine = open_device(opening.model, threads=opening.threads)
        facts = {"load_ms": engine.model.load_ms, "build_ms": engine.model.build_ms}
        return ProgramSession(engine.runner, facts, settings=(GREEDY, DRAWN))


class LiveSteps(Programs):
    """The steps of programs, traced and jitted in this process from a bundle's weights as floats."""

    name = "live-steps"

    def open(self, opening: Opening, progress: Progress) -> Session:
        """Opens a bundle; `options` has the lengths that an export would be given."""
        import jax.numpy as jnp

        from jaxllm.bundle import Bundle
        from jaxllm.config import WHOLE
        from jaxllm.kernels.native import without_native_kernels
        from jaxllm.quant import dequantize
        from serving.programs.live import LiveExecutor
        from serving.programs.runner import ProgramRunner

        began = time.perf_counter()
        with without_native_kernels(), Bundle.open(opening.model) as bundle:
            params = {name: dequantize(weight, jnp.float32) for name, weight in bundle.load().items()}
            cfg = bundle.cfg
        executor = LiveExecutor(
            "live steps",
            {WHOLE: params},
            {WHOLE: cfg},
            context_tokens=opening.context_tokens,
            **opening.options,
        )
        loaded = time.perf_counter()
        with without_native_kernels(branches=True):
            for signature in executor.manifest.signatures:
                # One after the other: `without_native_kernels` does not apply to other threads.
                executor.compile(signature)
        # The copies from short caches into longer ones are left.
        executor.prepare(executor.manifest.signatures)
        facts = {"load_ms": 1000 * (loaded - began), "build_ms": 1000 * (time.perf_counter() - loaded)}
        return ProgramSession(ProgramRunner(executor), facts)


class ProgramSession:
    """A runner of programs, called directly."""

    def __init__(
        self, runner: Any, facts: dict[str, Any], settings: Sequence[str] = (PROGRAM_BLOCKS,)
    ) -> None:
        self._runner, self._facts, self.settings = runner, facts, settings
        self._cached: list[int] = []
        self._token: Any = None
        self._cache: Any = None
        self._sampler: Any = None

    def facts(self) -> dict[str, Any]:
        """Times of opening."""
        return self._facts

    def prefill(self, prompt: Sequence[int], setting: str) -> int:
        """See `Session.prefill`."""
        from jaxllm.sampling import Sampling, sampler_state

        runner = self._runner
        sampling = Sampling(**_DRAWN) if setting == DRAWN else Sampling()
        sampler = sampler_state(sampling, prompt, runner.cfg.vocab_size, 0)
        logits, self._cache = prefill_prompt(runner, runner.start(len(prompt)), prompt, 0)
        self._token, self._sampler = runner.sample(logits, sampler)
        self._cached = list(prompt)
        return int(self._token[0])

    def decode(self, tokens: int, setting: str) -> list[int]:
        """See `Session.decode`."""
        import numpy as np

        from serving.text_stream import MAX_STOP_IDS

        runner = self._runner
        no_stop = np.full(MAX_STOP_IDS, -1, np.int32)
        rows, _, self._cache, self._sampler = runner.decode(
            self._token, self._cache, self._sampler, no_stop, tokens, self._cached
        )
        block = rows[0].tolist()
        self._cached += [int(self._token[0]), *block[:-1]]
        self._token = rows[0, -1:]
        return block

    def score(self, tokens: Sequence[int], targets: Sequence[int]) -> Sequence[float]:
        """See `Session.score`."""
        return self._runner.score(tokens, targets).tolist()
