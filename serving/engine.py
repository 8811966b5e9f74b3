"""The engine: a bundle's parameters, its graphs and its tokenizer, answering one request at a time."""

import copy
import dataclasses
import functools
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import jax

from jaxllm.bundle import Bundle, WeightFormat
from jaxllm.bundle.elastic import read_order, require_level
from jaxllm.bundle.prefill import release_prefill
from jaxllm.config import WHOLE, ModelConfig
from jaxllm.elastic.submodel import CountedSubModel
from jaxllm.elastic.units import reorder_adapter
from jaxllm.errors import ConfigError
from jaxllm.kernels.native import kernels
from jaxllm.lora import Adapter, LoraConfig, adapter_digest, padded
from jaxllm.models.parameters import Params
from jaxllm.quant import Weight
from jaxllm.tokenizer import Tokenizer
from serving.answerer import Answerer
from serving.buckets import BucketTable
from serving.executables import ExecutableFolder
from serving.experts.table import ExpertTable
from serving.experts.weights import ExpertWeights
from serving.forked import require_not_forked, watch_for_forks
from serving.generation import Generation, GenerationConfig, Session
from serving.graph_store import GraphStore
from serving.levels import Levels
from serving.machine import give_back_memory
from serving.models import open_model
from serving.options import EngineOptions
from serving.prefill.choice import chosen_prefill
from serving.prefill.processors import TwoProcessors
from serving.prefill.subgraph_times import SubgraphTimes, times_path
from serving.prefill.table import IntegerTable
from serving.progress import Progress, loading
from serving.sliding import Sliding
from serving.speculative.options import SpeculationOptions
from serving.streaming.footprint import drafter_bytes, streamed_weights
from serving.streaming.table import StreamedTable
from serving.streaming.weights import StreamedWeights
from serving.user_cache import cache_folder

if TYPE_CHECKING:
    from serving.speculative.table import SpeculativeTable


class Engine(Answerer):
    """Answers requests with one model, or one of its levels. Threads may share it (see `Answerer`).

    Attributes:
      bundle: the open model file.
      cfg: the model's config, or the sub-model's.
      options: resolved options.
      tokenizer: the model's tokenizer.
      table: the compiled graphs.
      load_ms: time to open the bundle and place its weights.
    """

    def __init__(
        self,
        bundle: Bundle,
        options: EngineOptions | None = None,
        progress: Progress | None = None,
        *,
        reserved_bytes: int = 0,
        drafting_level: int = 0,
    ) -> None:
        """Places a bundle's weights, and makes an empty table of graphs.

        Args:
          bundle: an open one.
          options: shapes of graphs and caches.
          progress: see `open`.
          reserved_bytes: of `EngineOptions.memory_bytes`, for others.
          drafting_level: a level that stays in memory whatever is read, to draft with; 0 for none.
        """
        require_not_forked()
        watch_for_forks()
        began = time.perf_counter()
        self.bundle = bundle
        self.cfg: ModelConfig = bundle.cfg
        quantized = bundle.layout.weights not in ("f32", "bf16")
        self.options = (options or EngineOptions()).resolve(bundle.cfg, quantized=quantized)
        self.tokenizer = Tokenizer(bundle.tokenizer_files())
        if quantized and jax.default_backend() == "cpu" and kernels().missing:
            _say_once(
                f"native CPU kernels are not in use ({kernels().reason}): XLA computes quantized products, "
                "several times slower; install jaxllm again where there is a C++ compiler (g++ or clang++)"
            )
        staying = require_level(bundle, drafting_level) if drafting_level else None
        self._streamed = streamed_weights(
            bundle, self.options, progress, reserved_bytes=reserved_bytes, level=staying
        )
        if self._streamed is not None:
            self._frozen = self._streamed.frozen()
        else:
            self._frozen = _load(bundle, progress)
        self._speculative: SpeculativeTable | None = None
        self._processors: TwoProcessors | None = None
        # Shared by all copies of this engine, as the weights are.
        self._adapter_digest = [""]
        self._levels = Levels(bundle, self.options.levels, self._frozen)
        params = self._adapted({}, 1.0)
        store = None
        if self.options.executables_bytes:
            folder = ExecutableFolder(
                cache_folder() / "executables", limit_bytes=self.options.executables_bytes
            )
            store = GraphStore(
                folder,
                cfg=bundle.cfg,
                options=self.options,
                params=params[WHOLE],
                kernels=repr(kernels()),
            )
        self.table: BucketTable | StreamedTable | ExpertTable
        levels = (*self._levels.cfgs, WHOLE)
        found = chosen_prefill(bundle, self.options, levels, streamed=self._streamed is not None)
        if isinstance(self._streamed, ExpertWeights):
            self.table = ExpertTable(bundle.cfg, params[WHOLE], self.options, self._streamed, store)
        elif self._streamed is not None:
            self.table = StreamedTable(bundle.cfg, params[WHOLE], self.options, self._streamed, store)
        elif found is not None:
            measured = None
            if self.options.prefill.processors > 1:
                self._processors = TwoProcessors(self.options.prefill.integer_device)
                measured = SubgraphTimes(times_path(bundle, self.options))
            self.table = IntegerTable(
                bundle.cfg, params[WHOLE], self.options, found, store, self._processors, measured
            )
            release_prefill(bundle)
        else:
            self.table = BucketTable(bundle.cfg, params[WHOLE], self.options, store)
        if bundle.read_in_place or self._streamed is not None:
            self.table.guard(bundle.held.require_unchanged)
        for level, cfg in self._levels.cfgs.items():
            self.table.add_level(level, cfg, params[level], same_graphs=self._levels.counted)
        self.load_ms = 1000 * (time.perf_counter() - began)

    @classmethod
    def open(
        cls,
        model: str | Path | None = None,
        *,
        weights: WeightFormat | None = None,
        options: EngineOptions | None = None,
        adapter: str | Path | None = None,
        level: int = WHOLE,
        speculation: SpeculationOptions | None = None,
        warm_up: bool = True,
        progress: Progress | None = None,
    ) -> "Engine":
        """Opens a model and compiles its graphs.

        Args:
          model: a bundle, a Hugging Face folder (prepared on the fly and cached), or None for the
            model inside the package.
          weights: width for a folder's weights; None keeps the checkpoint's own.
          options: shapes of graphs and caches.
          adapter: a low-rank adapter in PEFT's layout to begin with; unless the options name a rank and
            targets, they are this one's.
          level: the sub-model to be (see `at`), in percent; it is served even if the options do not name it.
          speculation: how drafts speed its answers up; None for no drafts.
          warm_up: compile every graph now; else call `warm_up` before the first request.
          progress: called with (stage, done, total).

        Raises:
          JaxllmError: the model cannot be opened, or the options do not fit it.
        """
        bundle = open_model(model, weights=weights, progress=progress)
        if level not in (WHOLE, *(options or EngineOptions()).levels):
            options = options or EngineOptions()
            options = dataclasses.replace(options, levels=tuple(sorted({*options.levels, level})))
        if speculation is not None:
            options = dataclasses.replace(options or EngineOptions(), trees=speculation.trees)
            if speculation.level and speculation.level not in options.levels:
                levels = tuple(sorted({*options.levels, speculation.level}))
                options = dataclasses.replace(options, levels=levels)
        lora, arrays = (None, {}) if adapter is None else _read_adapter(Path(adapter), bundle)
        if lora is not None and not (options or EngineOptions()).adapter_rank:
            rank = max(part.shape[-2] for name, part in arrays.items() if name.endswith(".right"))
            options = dataclasses.replace(
                options or EngineOptions(), adapter_rank=rank, adapter_targets=lora.targets
            )
        reserved = drafting_level = 0
        if speculation is not None and options is not None and options.memory_bytes:
            reserved = drafter_bytes(speculation, options.context_tokens, bundle.cfg)
            drafting_level = speculation.level
        whole = cls(bundle, options, progress, reserved_bytes=reserved, drafting_level=drafting_level)
        try:
            if lora is not None:
                whole._put(arrays, lora.scaling)
            engine = whole.at(level)
            if level != WHOLE and isinstance(engine.table, IntegerTable):
                engine.table.ways.require(level)
            if speculation is not None:
                # Here, because drafters open engines.
                from serving.speculative.drafters import make_drafter
                from serving.speculative.table import SpeculativeTable

                drafter = make_drafter(engine, speculation, progress)
                engine.answer_with(SpeculativeTable(engine.table, drafter, speculation))
            if warm_up:
                engine.warm_up(progress=progress)
            return engine
        except BaseException:
            # Readers and processors would stay until this process ends.
            whole.close()
            raise

    @property
    def name(self) -> str:
        """The model's name, for people."""
        return self.bundle.layout.name

    def at(self, level: int) -> "Engine":
        """This engine as its sub-model of a level: weights, graphs and adapters stay shared.

        Raises:
          ConfigError: the engine was not opened for this level.
        """
        engine = copy.copy(self)
        engine._speculative = None
        engine.table = self.table.at(level)
        engine.cfg = engine.table.cfg
        return engine

    def answer_with(self, speculative: "SpeculativeTable") -> None:
        """Takes something that drafts this engine's answers, whose target is the engine's table."""
        self._speculative = speculative

    @property
    def speculative(self) -> "SpeculativeTable | None":
        """What drafts this engine's answers, if anything does."""
        return self._speculative

    @property
    def streamed(self) -> StreamedWeights | ExpertWeights | None:
        """What reads the weights while the engine runs, where they are not all in memory."""
        return self._streamed

    def close(self) -> None:
        """Ends the reading of weights and the processors of prefill, if there are such; it answers nothing
        more."""
        with self.table.lock:
            if self._streamed is not None:
                self._streamed.close()
            if self._processors is not None:
                self._processors.close()
            self.table.close()
        # Compiling leaves gaps between what it keeps, which grow with every engine.
        give_back_memory()

    def prefill_mode(self, tokens: int, level: int | None = None) -> Literal["int8", "float"]:
        """How a prompt of so many tokens is read, at a level or at this engine's own."""
        table = self.table if level is None else self.table.at(level)
        return table.mode_for(tokens) if isinstance(table, IntegerTable) else "float"

    @property
    def adapter_digest(self) -> str:
        """Tells the adapter that is on the model from all others, in hex; empty where there is none."""
        return self._adapter_digest[0]

    def set_adapter(self, folder: str | Path | None) -> None:
        """Puts a low-rank adapter on the model, in place of the one before; nothing is compiled.

        Sessions that go on afterwards are fed anew: their cache is of other weights.

        Args:
          folder: in PEFT's layout; None for the model as it is.

        Raises:
          ConfigError: the engine was opened without `adapter_rank`, or for a lower one or other targets.
          CheckpointError: the folder is missing, corrupt or of another model.
        """
        if not self.options.adapter_rank:
            raise ConfigError("this engine takes no adapters; open it with EngineOptions(adapter_rank=...)")
        lora, adapter = (None, {}) if folder is None else _read_adapter(Path(folder), self.bundle)
        with self.table.lock:
            self._put(adapter, 1.0 if lora is None else lora.scaling)

    def _put(self, adapter: Adapter, scaling: float) -> None:
        if adapter and isinstance(self.table, IntegerTable):
            self.table.ways.require_adaptable()
        # All are made before the first is changed: an adapter that does not fit changes nothing.
        for level, params in self._adapted(adapter, scaling).items():
            self.table.at(level).swap(params)
        if isinstance(self.table, IntegerTable):
            self.table.ways.adapt(bool(adapter))
        self._adapter_digest[0] = adapter_digest(adapter, scaling) if adapter else ""

    def _adapted(self, adapter: Adapter, scaling: float) -> dict[int, Params | CountedSubModel]:
        """The parameters of all levels, with room for an adapter if the options ask for it, and this one in
        it."""
        rank, targets = self.options.adapter_rank, self.options.adapter_targets
        filled = padded(self.bundle.cfg, adapter, targets, rank) if rank else {}
        return self._levels.params(self._frozen, filled, scaling)

    def warm_up(
        self,
        *,
        prompt_tokens: int | None = None,
        max_tokens: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """Compiles and rehearses all graphs, or only compiles those that one request needs.

        The whole model's engine does so for all of its levels, an engine at a level for that one.

        Graphs that an earlier process compiled are read instead (see `EngineOptions.executables_bytes`).

        Args:
          prompt_tokens: of that one request; None stands for all requests. Only what its first token
            needs is waited for, the rest gets ready in the background.
          max_tokens: of that one request; 0 where it is not known.
          progress: called with ("compile", graphs done, graphs in all).
        """
        with self.table.lock:
            self._warm_up(prompt_tokens, max_tokens, progress)

    def _warm_up(self, prompt_tokens: int | None, max_tokens: int, progress: Progress | None) -> None:
        levels = self.table.levels if self.table.level == WHOLE else (self.table.level,)
        tables = [self.table.at(each) for each in levels]
        if prompt_tokens is None:
            self.table.fill([bucket for table in tables for bucket in table.all_buckets()], progress)
            for table in {table.graphs_level: table for table in tables}.values():
                table.rehearse()
            if self._speculative is not None:
                self._speculative.fill(progress)
        elif 0 < prompt_tokens <= self.options.context_tokens:
            table = self.table if self._speculative is None else self._speculative
            needed = table.request_buckets(prompt_tokens, max_tokens)
            first = [bucket for bucket in needed if bucket.kind != "decode"]
            self.table.fill(first, progress, later=needed)
            self.table.time_request(prompt_tokens, max_tokens)
            if self._speculative is not None:
                tokens = prompt_tokens + max_tokens if max_tokens else None
                self._speculative.fill(progress, tokens=tokens)

    def stream(
        self,
        prompt: str | Sequence[int],
        config: GenerationConfig | None = None,
        *,
        level: int | None = None,
        session: Session | None = None,
        sliding: Sliding | None = None,
        tpot_ms: float | None = None,
    ) -> Generation:
        """Answers a prompt: text (special tokens are added) or token ids.

        Args:
          prompt: what the model continues.
          config: length, stops and sampling of the answer.
          level: the sub-model that answers, in percent, one of `EngineOptions.levels` or 100; None for the
            one that this engine is (`at`).
          session: a conversation whose cache is used and extended.
          sliding: how an answer goes on that outgrows the context; None to end it there.
          tpot_ms: what a further token should take, if that is known: the second token then need not come
            alone to measure it.

        Raises:
          ConfigError, ContextOverflow: the prompt is empty, malformed or too long, or the level is not
            served.
        """
        table = self.table if level is None else self.table.at(level)
        if self._speculative is not None and table is self.table:
            table = self._speculative
        return self._answer(table, prompt, config, session, sliding, tpot_ms)


def _load(bundle: Bundle, progress: Progress | None) -> dict[str, Weight]:
    loaded = loading(progress, bundle.weight_bytes)
    return bundle.load(on_segment=lambda _, size: loaded(size))


def _read_adapter(folder: Path, bundle: Bundle) -> tuple[LoraConfig, Adapter]:
    """An adapter of the model that the bundle was made from, its units in the bundle's order."""
    # Here, because most engines never see an adapter, and its files' library takes time to import.
    from jaxllm.checkpoints.peft_folder import read_adapter

    lora, adapter = read_adapter(folder, bundle.cfg)
    order = read_order(bundle)
    return lora, adapter if order is None else reorder_adapter(adapter, order)


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger("jaxllm").warning(message)
