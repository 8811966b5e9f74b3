"""Runs prefill by stage programs on two processors, out of order: each a LiteRT interpreter on its own
threads.

On a phone they are an NPU and a CPU or GPU; on a desktop two groups of cores replace them, each with its
own XNNPACK threads, and neither is faster. They are interpreters, because these release Python's lock while
they compute, which compiled models do not. A prompt's chunks and order are chosen by times measured here:
of each stage with the other processor idle, and busy.
"""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import FULL_LEVEL
from jaxllm.errors import ConfigError, ProgramError, one_line
from jaxllm.export.contents import require_extra
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.folder_format.parts import EMBED, STAGE_FILES, stage_name
from jaxllm.export.folder_format.signature import KEYS, VALUES, lengthened
from jaxllm.export.programs.executor import Executor
from jaxllm.export.programs.litert_library import captured_messages
from jaxllm.export.programs.runner import ProgramCache, ProgramRunner, TokenChooser, chunk_inputs
from jaxllm.int8_prefill.schedule import (
    PROCESSORS,
    Dispatcher,
    Order,
    Processor,
    Stage,
    Subgraph,
    Times,
    prompt_subgraphs,
)
from jaxllm.serving.host.machine import cpu_features, usable_cores
from jaxllm.serving.host.user_cache import device_file
from jaxllm.serving.int8_prefill.processor_pair import (
    ChunkPlanner,
    ProcessorPair,
    SubgraphTimes,
    Trace,
    halved_cores,
    measured_times,
)
from jaxllm.serving.runners.runner import PrefillChunk

# A layer's cache among a stage's arrays, and its name in a folder.
_CACHE = {"keys": KEYS, "values": VALUES}
_TIMED_RUNS = 3
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class TimedStage:
    """Stages with equal times: of all layers with a shadow, or of all without."""

    stage: Stage
    shadowed: bool
    tokens: int


def times_path(manifest: Manifest) -> Path:
    """Path of the times of a folder's stages on this device."""
    facts = {
        "files": {name: manifest.files[name].xxh3_128 for name in sorted(STAGE_FILES.values())},
        "runtime": importlib.metadata.version("ai-edge-litert"),
        "device": [*cpu_features(), usable_cores()],
    }
    return device_file(facts, ".subgraphs.json")


class StagedPrompt:
    """Prompt between its stages: results so far of each chunk, and the cache of each layer.

    Attributes:
      chunks: arrays by name, of each chunk.
      layers: `keys` and `values` `[1, K, S, H]` of each layer.
      lengths: lengths of chunks, and their positions.
    """

    def __init__(
        self,
        call: Callable[[Subgraph, int, Arrays], Arrays],
        chunks: list[Arrays],
        layers: list[Arrays],
        lengths: Sequence[tuple[int, int]],
    ) -> None:
        """`call` is (subgraph, tokens of its chunk, known arrays) -> results."""
        self.chunks, self.layers, self.lengths, self._call = chunks, layers, lengths, call

    def run(self, each: Subgraph) -> None:
        """Runs one stage after those that it depends on."""
        found = self._call(each, self.lengths[each.chunk][0], self._known(each))
        for name, array in found.items():
            (self.layers[each.layer] if name in _CACHE else self.chunks[each.chunk])[name] = array

    def repeated(self, each: Subgraph) -> Callable[[], None]:
        """Returns a function that runs a stage at each call, and leaves the results so far unchanged."""
        known = self._known(each)

        def once() -> None:
            self._call(each, self.lengths[each.chunk][0], known)

        return once

    def _known(self, each: Subgraph) -> Arrays:
        return {**self.chunks[each.chunk], **self.layers[each.layer]}


class StagePrograms:
    """Stage programs of a folder on two processors. Not thread-safe: one prompt at a time."""

    def __init__(
        self, manifest: Manifest, folder: Path, *, order: Order = "out-of-order", times: Path | None = None
    ) -> None:
        """Opens both models, each on its own cores.

        Args:
          order: see `jaxllm.int8_prefill.schedule.Dispatcher`.
          times: file of the stages' times; None to store none.

        Raises:
          ConfigError: the folder has no stages, LiteRT is not installed, or this process has only one core.
          ProgramError: a model is corrupt, or LiteRT rejects it.
        """
        if manifest.stages is None:
            raise ConfigError(f"{folder} has no stages for two processors; export the model with --stages")
        require_extra("export", "ai_edge_litert")
        self.facts, self._manifest = manifest.stages, manifest
        self.order: Order = order
        self.cfg, self._room = manifest.levels[FULL_LEVEL].cfg, manifest.context_tokens
        self.measured = SubgraphTimes(times, TimedStage)
        cores = halved_cores()
        self.pair = ProcessorPair(cores)
        self._programs: dict[Processor, Callable[[str], Any]] = {}
        # Inputs of each program, by its name.
        self._taken: dict[str, Sequence[str]] = {}
        for processor in PROCESSORS:
            path = manifest.require_intact(folder, STAGE_FILES[processor])
            opened = functools.partial(self._open, processor, path, max(1, len(cores[processor])))
            # On the processor's thread, so that XNNPACK's threads are on its cores.
            self.pair.timed(processor, opened)
        self._planner = ChunkPlanner(
            self.facts.chunk_tokens, order, self.measured, self._timed_stage, self.subgraphs
        )

    def close(self) -> None:
        """Ends both threads."""
        self.pair.close()

    def _open(self, processor: Processor, path: Path, threads: int) -> None:
        from ai_edge_litert.interpreter import Interpreter

        with captured_messages() as said:
            try:
                interpreter = Interpreter(str(path), num_threads=threads)
            except (RuntimeError, ValueError) as error:
                raise ProgramError(
                    f"{path}: LiteRT refuses it ({one_line(error)}; {one_line(said())}); export it again"
                ) from error
        self._programs[processor] = functools.cache(interpreter.get_signature_runner)
        self._taken |= {name: each["inputs"] for name, each in interpreter.get_signature_list().items()}

    def warm_up(self) -> None:
        """Measures the stages that have no times yet, and stores their times."""
        cases = [(tokens, self._room) for tokens in self.facts.chunk_tokens]
        self._planner.measure_missing(cases, lambda tokens, room: self.measure(tokens))

    def measure(self, tokens: int, runs: int = _TIMED_RUNS) -> None:
        """Times the stages of chunks of `tokens` tokens, with the other processor idle and busy."""
        fed = np.linspace(0, self.cfg.vocab_size - 1, tokens).astype(int).tolist()

        def begin(full: bool) -> StagedPrompt:
            return self._begin(fed, (self._room - tokens) * full, {}, [tokens])

        found, handover_ms = measured_times(
            self.pair,
            begin,
            self.subgraphs(1),
            lambda each: self._timed_stage(each.layer, each.stage, tokens),
            runs,
        )
        self.measured.put(found, handover_ms)
        self._planner.chosen.clear()

    def prefill(
        self,
        tokens: Sequence[int],
        at: int,
        rows: Mapping[str, np.ndarray],
        lengths: Sequence[int] | None = None,
    ) -> tuple[Arrays, Trace]:
        """Runs a prompt through all layers.

        Args:
          at: position of the first.
          rows: cached rows of the `at` preceding tokens, `[1, K, at, H]` by the names of caches; empty for
            an empty cache.
          lengths: lengths of chunks; None to choose them by the measured times.

        Returns:
          The caches with the prompt's rows, `[1, K, at + tokens, H]` by name; and the measured schedule.
        """
        lengths = lengths or self.plan(len(tokens), at)
        prompt = self._begin(tokens, at, rows, lengths)
        dispatcher = Dispatcher(self.subgraphs(len(lengths)), self.times_of(prompt.lengths), self.order)
        trace = self.pair.run(dispatcher, prompt.run)
        end = at + len(tokens)
        found = {
            name.format(layer): each[side][:, :, :end]
            for layer, each in enumerate(prompt.layers)
            for side, name in _CACHE.items()
        }
        return found, trace

    def plan(self, tokens: int, at: int) -> Sequence[int]:
        """Lengths of the chunks of a prompt, chosen with the order of their stages by simulation."""
        return self._planner.plan(tokens, at, self._room)

    def subgraphs(self, chunks: int) -> Sequence[Subgraph]:
        """The stages of a prompt of so many chunks."""
        return prompt_subgraphs(chunks, self.facts.shadowed)

    def times_of(self, chunks: Sequence[tuple[int, int]], *, shared: bool = False) -> Times:
        """A function of measured times, for chunks by their lengths and positions (see
        `ChunkPlanner.times`)."""
        return self._planner.times(chunks, self._room, shared=shared)

    def _begin(
        self, tokens: Sequence[int], at: int, rows: Mapping[str, np.ndarray], lengths: Sequence[int]
    ) -> StagedPrompt:
        chunks, places, fed = [], [], 0
        for length in lengths:
            chunks.append(chunk_inputs(tokens[fed : fed + length], length, at + fed))
            places.append((length, at + fed))
            fed += length
        shapes = self._manifest.cache_shapes(FULL_LEVEL, self._room)
        layers: list[Arrays] = [{} for _ in range(self.cfg.layers)]
        for layer, each in enumerate(layers):
            for side, name in _CACHE.items():
                shape = shapes[name.format(layer)]
                each[side] = lengthened(
                    rows.get(name.format(layer), np.zeros((1, 1, 0, 1), np.float32)), shape
                )
        prompt = StagedPrompt(self._call, chunks, layers, places)

        def embed() -> None:
            for chunk, (length, _) in zip(chunks, places, strict=True):
                chunk |= self._run("float", f"{EMBED}_{length}", chunk)

        self.pair.timed("float", embed)
        return prompt

    def _call(self, each: Subgraph, tokens: int, known: Mapping[str, np.ndarray]) -> Arrays:
        return self._run(each.processor, stage_name(each.stage, each.layer, tokens), known)

    def _run(self, processor: Processor, name: str, known: Mapping[str, np.ndarray]) -> Arrays:
        return self._programs[processor](name)(**{each: known[each] for each in self._taken[name]})

    def _timed_stage(self, layer: int, stage: Stage, tokens: int, room: int = 0) -> TimedStage:
        del room
        return TimedStage(stage, self.facts.shadowed[layer], tokens)


class StagedRunner(ProgramRunner):
    """Runner of the whole model that prefills by stages (see `ProgramRunner`).

    A cache is copied to Python's memory once for each prompt, from the programs that decode to the stages
    and back. Prompts shorter than the shortest chunk of stages run on the prefill programs.
    """

    def __init__(
        self, executor: Executor, stages: StagePrograms, token_chooser: TokenChooser | None = None
    ) -> None:
        super().__init__(executor, FULL_LEVEL, token_chooser)
        self.stages = stages

    def prefill_chunks(self, tokens: int) -> list[PrefillChunk]:
        """See `Runner`; one chunk, whose own chunks the processors share out of order."""
        return [PrefillChunk(tokens=tokens, last=True)]

    def prefill(
        self, cache: ProgramCache, tokens: Sequence[int], at: int, chunk: PrefillChunk
    ) -> tuple[Any, ProgramCache]:
        """See `Runner`."""
        count = len(tokens) - 1
        if count < self.stages.facts.chunk_tokens[0]:
            return super().prefill(cache, tokens, at, chunk)
        rows, _ = self.stages.prefill(tokens[:-1], at, self.rows(cache, at) if at else {})
        caches = self.executor.restored(self.level, cache.capacity_tokens, rows)
        return self.step(cache.after(caches, at + count), tokens[-1], at + count)
