"""Ours: the engine as the service runs it, and with one dispatch per token.

A decode block runs several tokens on the device before the host sees them; `one token per dispatch` is the
loop that engines without on-device sampling run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.peer import Opening, Progress, Session
from jaxllm.config import ModelConfig

BLOCKS, ONE_TOKEN = "blocks of tokens", "one token per dispatch"


class Ours:
    """What our own forms of a model have in common: they are here, and run what was made for them."""

    slow = False

    def missing(self) -> str | None:
        """Nothing: it is us."""
        return None

    def refusal(self, cfg: ModelConfig) -> str | None:
        """None: it has been opened as one of our models."""
        return None


class JaxllmEngine(Ours):
    """Our engine on a bundle or a folder."""

    name = "jaxllm"

    def systems(self, weights: str) -> Mapping[str, str]:
        """One row, at the width that is asked for."""
        return {self.name: weights}

    def open(self, opening: Opening, progress: Progress) -> Session:
        """Opens the engine and compiles all of its graphs."""
        return EngineSession(opening, progress)


class EngineSession:
    """An engine, driven below its streaming: prompt in, ids out."""

    settings = (BLOCKS, ONE_TOKEN)

    def __init__(self, opening: Opening, progress: Progress) -> None:
        from serving.engine import Engine
        from serving.options import EngineOptions

        given = {k: tuple(v) if isinstance(v, list) else v for k, v in opening.options.items()}
        options = EngineOptions(**given)
        weights = opening.format if opening.model.is_dir() else None
        self._engine = Engine.open(
            opening.model, weights=weights, options=options, warm_up=False, progress=progress
        )
        self._engine.warm_up(progress=progress)
        self._cache: Any = None
        self._sampler: Any = None
        self._token: Any = None

    def facts(self) -> dict[str, Any]:
        """What opening took, and the sizes of the weights."""
        import jax

        from jaxllm.models.parameters import parameter_count

        engine = self._engine
        tensors, cfg = engine.bundle.layout.tensors, engine.cfg
        step_bytes = sum(
            tensor.size_bytes
            for name, tensor in tensors.items()
            # Of an embedding table one row is read; a tied one is the head too, and read whole.
            if not name.startswith("embed.") or (cfg.tied_head and name == "embed.tokens")
        )
        weight_bytes = engine.bundle.weight_bytes
        device = jax.devices()[0]
        memory = device.memory_stats() if device.platform != "cpu" else None
        return {
            "backend": jax.default_backend(),
            "load_ms": engine.load_ms,
            "build_ms": engine.table.build_ms,
            "graphs": len(engine.table.bucket_ms),
            "graphs_read": len(engine.table.loaded),
            "weight_bytes": weight_bytes,
            "bits_per_weight": 8 * weight_bytes / parameter_count(cfg),
            "step_bytes": step_bytes,
            "device_bytes": (memory or {}).get("peak_bytes_in_use", 0),
            "context_tokens": engine.options.context_tokens,
        }

    def kernel_ms(self) -> float:
        """Time that this process has spent in native kernels."""
        from jaxllm.kernels import native

        return native.busy_ns() / 1e6

    def prefill(self, prompt: Sequence[int], setting: str) -> int:
        """See `Session.prefill`."""
        import numpy as np

        from jaxllm.sampling import Sampling, sampler_state

        table = self._engine.table
        # As the service does for a prompt of this length: the cache grows when decoding needs it to.
        cache = table.start(len(prompt))
        sampler = sampler_state(Sampling(), prompt, self._engine.cfg.vocab_size, 0)
        logits, self._cache = table.prefill(cache, prompt, 0)
        self._token, self._sampler = table.sample(logits, sampler)
        self._length = len(prompt)
        return int(np.asarray(self._token)[0])

    def decode(self, tokens: int, setting: str) -> list[int]:
        """See `Session.decode`."""
        import numpy as np

        from serving.text import MAX_STOP_IDS

        table = self._engine.table
        block = self._engine.options.decode_block if setting == BLOCKS else 1
        no_stop = np.full(MAX_STOP_IDS, -1, np.int32)
        ids: list[int] = []
        while len(ids) < tokens:
            limit = min(block, tokens - len(ids))
            cache = table.make_room(self._cache, self._length + limit)
            rows, count, self._cache, self._sampler = table.decode(
                self._token, cache, self._sampler, no_stop, limit
            )
            got = np.asarray(rows)[0, : int(count)]
            self._token = got[-1:]
            self._length += len(got)
            ids += got.tolist()
        return ids

    def score(self, tokens: Sequence[int], targets: Sequence[int]) -> Sequence[float]:
        """See `Session.score`."""
        table = self._engine.table
        table.fill(table.score_buckets(len(tokens)))
        return table.score(tokens, targets).tolist()
