"""Opens folders of exported programs as models of an engine, with a runner for each level."""

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.config import FULL_LEVEL
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.export.folder_format.manifest import CHAT, LOOP, MAIN, TINY_TOKENIZER, TOKENIZER, Manifest
from jaxllm.export.folder_format.parts import KEEP, MODEL, PROMPT, TinyLmFacts, adapter_file
from jaxllm.export.folder_format.signature import MASK, TOKENS
from jaxllm.export.programs.drafts import ProgramDrafter
from jaxllm.export.programs.executor import Accelerator, Executor
from jaxllm.export.programs.runner import ProgramRunner, TokenChooser
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.host.allocator import give_back_memory
from jaxllm.serving.host.machine import memory_bytes, require_not_forked, watch_for_forks
from jaxllm.serving.host.process_memory import give_back_libraries
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.host.user_cache import buckets_bytes
from jaxllm.serving.speculation.drafter import Drafter, NgramDrafter, require_same_kind
from jaxllm.serving.speculation.speculation import Speculation
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles

if TYPE_CHECKING:
    from jaxllm.export.programs.stages import StagePrograms
    from jaxllm.serving.buckets.bucket_table import CompiledBucketFolder


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramTinyLm(TinyLmFacts):
    """The classes and the tokens of a folder's tiny LM (see
    `jaxllm.serving.elastic.tiny_proposer.TinyClasses`); `tokenizer`: its own, None for the model's."""

    tokenizer: TokenizerFiles | None = None


class ProgramModel:
    """Programs of one folder, with a runner for each level (see `jaxllm.serving.engine.engine.Model`).

    Attributes:
      tiny_lm: tiny LM that plans requests; None for none.
      stages: stage programs that prefill on two processors; None for one processor.
      load_ms: time to open the folder and place its weights.
      build_ms: time to prepare programs.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        token_chooser: TokenChooser | None = None,
        *,
        tiny_lm: ProgramTinyLm | None = None,
        stages: "StagePrograms | None" = None,
    ) -> None:
        """See `open_program_model`; `token_chooser` samples tokens, None makes one; `stages` prefill the
        whole model's prompts, None for its prefill programs."""
        watch_for_forks()
        self.executor, self.tokenizer, self.tiny_lm = executor, tokenizer, tiny_lm
        self._runners: dict[int, ProgramRunner] = {}
        self.stages = stages
        if stages is None:
            self._runners[FULL_LEVEL] = ProgramRunner(executor, token_chooser=token_chooser)
        else:
            from jaxllm.export.programs.stages import StagedRunner

            self._runners[FULL_LEVEL] = StagedRunner(executor, stages, token_chooser)
        self._token_chooser = self._runners[FULL_LEVEL].token_chooser
        self.load_ms = self.build_ms = 0.0

    @property
    def name(self) -> str:
        """Display name of the model."""
        return self.executor.manifest.name

    @property
    def levels(self) -> tuple[int, ...]:
        """Exported levels, in percent, ascending."""
        return tuple(sorted(self.executor.manifest.levels))

    @property
    def program_files(self) -> dict[str, str]:
        """Checksums of the files that determine results, by name: all but the loop, tokenizers and
        adapters."""
        manifest = self.executor.manifest
        names = () if manifest.adapters is None else manifest.adapters.names
        others = {LOOP, MAIN, CHAT, TOKENIZER, TINY_TOKENIZER, *map(adapter_file, names)}
        files = sorted(manifest.files.items())
        return {name: stored.xxh3_128 for name, stored in files if name not in others}

    @property
    def images(self) -> None:
        """Exported programs have no encoder of images."""

    def runner(self, level: int) -> ProgramRunner:
        """The runner of a level.

        Raises:
          ConfigError: it was not exported.
        """
        if level not in self._runners:
            self._runners[level] = ProgramRunner(self.executor, level, self._token_chooser)
        return self._runners[level]

    def run_tiny_lm(self, row: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores a row `[1, T]` int32 with its mask `[1, T]` bool by the tiny LM (see
        `jaxllm.serving.elastic.tiny_proposer.TinyProposer`); T is a length that it has a program for."""
        manifest = self.executor.manifest
        signature = manifest.signature("tiny_lm", row.shape[1], FULL_LEVEL, manifest.context_tokens)
        out, _ = self.executor.run(signature, {TOKENS: row, MASK: mask})
        keep, model, prompt = (np.asarray(out[name]) for name in (KEEP, MODEL, PROMPT))
        return keep, model, prompt

    def drafts(self, level: int, options: SpeculationOptions, *, threads: int = 0) -> Speculation:
        """Makes drafts for a level, by the drafter in the options.

        Args:
          level: level that answers.
          options: options with a folder of programs as `model`; the sizes of `trees` are replaced by those
            that the level verifies.
          threads: number of threads of LiteRT for the drafter; 0 for all cores of this process.

        Raises:
          ConfigError: the level cannot verify trees, or the drafter does not fit it.
          ProgramError: the drafter's folder is not one of programs, corrupt, or of other weights.
        """
        target, executor = self.runner(level), self.executor
        sizes = executor.manifest.sizes("verify", level)
        if not sizes:
            raise ConfigError(
                f"the programs of level {level} verify no drafts; export the model with --verify-tokens 4 "
                "--verify-tokens 8"
            )
        branches = options.trees.branches if executor.moves_rows else 1
        trees = dataclasses.replace(
            options.trees, nodes=sizes, room=max(sizes[-1], options.trees.room), tips=1, branches=branches
        )
        if options.drafter == "ngram":
            drafter: Drafter = NgramDrafter(trees)
        elif options.drafter == "level":
            drafter = ProgramDrafter(ProgramRunner(executor, options.level, self._token_chooser), trees)
        elif options.drafter == "model" and options.model is not None:
            folder = Path(options.model)
            other = open_executor(folder, threads=threads)
            if not Tokenizer(other.manifest.read_tokenizer(folder)).same_tokens(self.tokenizer):
                raise ConfigError(
                    f"{folder} has another tokenizer than the programs that it is to draft for; export a "
                    "model that was trained on theirs"
                )
            # It samples nothing, so any chooser will do.
            runner = ProgramRunner(other, token_chooser=self._token_chooser)
            require_same_kind(folder, runner.cfg, "the target", target.cfg)
            drafter = ProgramDrafter(runner, trees)
        else:
            raise ConfigError(
                f"there is no drafter {options.drafter!r} of programs; there are model, ngram, level"
            )
        return Speculation(target, drafter, dataclasses.replace(options, trees=trees))

    def warm_up(
        self,
        level: int,
        speculation: Any,
        *,
        prompt_tokens: int | None,
        max_tokens: int,
        progress: Progress | None,
    ) -> None:
        """Prepares the programs of a level: all, or those that one request needs (see
        `jaxllm.serving.engine.engine.Engine.warm_up`); also the buckets that choose tokens, greedy or
        sampled. Such a request compiles nothing."""
        began = time.perf_counter()
        runner, trees = self.runner(level), () if speculation is None else speculation.options.trees.nodes
        self._token_chooser.prepare(trees)
        wanted, tokens = runner.signatures, None
        if prompt_tokens is not None:
            answer = max_tokens if speculation is None else speculation.cache_tokens(max_tokens)
            wanted, tokens = runner.request_signatures(prompt_tokens, answer, trees), prompt_tokens + answer
        self.executor.prepare(wanted, progress)
        if self.stages is not None and level == FULL_LEVEL:
            self.stages.warm_up()
        if speculation is not None:
            speculation.drafter.warm_up(progress, tokens=tokens)
        self.build_ms += 1000 * (time.perf_counter() - began)

    def facts(self) -> dict[str, Any]:
        """Empty: executors count no buckets."""
        return {}

    def set_adapter(self, folder: str | Path | None) -> None:
        """Applies an adapter of the folder to all levels, by its exported name; None for none.

        Raises:
          ConfigError: it was not exported with the model.
        """
        with self.executor.lock:
            self.executor.adapters.use("" if folder is None else str(folder))

    def close(self) -> None:
        """Ends the threads of the two processors, if there are any."""
        if self.stages is not None:
            self.stages.close()


def open_executor(folder: Path, *, threads: int = 0, accelerator: Accelerator = "cpu") -> Executor:
    """Opens the executor of a folder of `jaxllm export`.

    Args:
      threads: number of threads of LiteRT; 0 for all cores of this process.

    Raises:
      ProgramError: the folder is not one of programs, corrupt, or of other weights.
      ConfigError: its runtime is not installed, or it does not support this device.
      BudgetExceeded: its caches are larger than this machine's memory.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; make one with `jaxllm export`")
    manifest = Manifest.read(folder)
    there = memory_bytes()
    for level in manifest.levels:
        taken = manifest.cache_bytes(level, manifest.context_tokens) + manifest.source_bytes(level)
        if there is not None and taken > there:
            raise BudgetExceeded(
                f"{folder}: caches of {manifest.context_tokens} tokens take {taken:,} bytes, and this "
                f"machine has {there:,}; export the model with a shorter --context"
            )
    if manifest.format == "stablehlo":
        if accelerator != "cpu":
            raise ConfigError("StableHLO programs run where JAX runs; --accelerator goes with TFLite ones")
        from jaxllm.export.programs.jax_programs import StableHloExecutor

        return StableHloExecutor(manifest, folder, cached_buckets())
    from jaxllm.export.programs.litert import LiteRtExecutor

    return LiteRtExecutor(manifest, folder, threads=threads, accelerator=accelerator)


def cached_buckets() -> "CompiledBucketFolder | None":
    """This user's folder of compiled buckets; None if its limit is 0."""
    # Here, because LiteRT's programs run without JAX.
    from jaxllm.serving.buckets.bucket_table import CompiledBucketFolder

    return CompiledBucketFolder.of_user(limit_bytes=buckets_bytes())


def open_program_model(
    folder: Path,
    *,
    threads: int = 0,
    token_chooser: TokenChooser | None = None,
    processors: int = 1,
    accelerator: Accelerator = "cpu",
) -> ProgramModel:
    """Opens a folder of `jaxllm export`.

    Args:
      threads: number of threads of LiteRT; 0 for all cores of this process.
      token_chooser: samples tokens other than the most likely; None compiles buckets, which are cached on
        disk.
      accelerator: what runs LiteRT's programs.
      processors: 2 to prefill by the folder's stages on two processors, whose measured times are stored.

    Raises:
      ProgramError: it is not a program folder, corrupt, or of other weights.
      ConfigError: its runtime is not installed, or programs without stages are requested on two processors.
    """
    require_not_forked()
    began = time.perf_counter()
    executor = open_executor(folder, threads=threads, accelerator=accelerator)
    tokenizer = Tokenizer(executor.manifest.read_tokenizer(folder))
    if token_chooser is None:
        # Here, because LiteRT's programs run without JAX.
        from jaxllm.export.programs.jax_programs import BucketChooser
        from jaxllm.host_settings import require_usable_jax

        require_usable_jax()
        token_chooser = BucketChooser(executor.manifest.levels[FULL_LEVEL].cfg.vocab_size, cached_buckets())
    tiny_lm = stages = None
    if (facts := executor.manifest.tiny_lm) is not None:
        files = executor.manifest.read_tokenizer(folder, TINY_TOKENIZER) if facts.own_tokenizer else None
        tiny_lm = ProgramTinyLm(**vars(facts), tokenizer=files)
    if processors > 1:
        # Here, because few folders have stages.
        from jaxllm.export.programs.stages import StagePrograms, times_path

        stages = StagePrograms(executor.manifest, folder, times=times_path(executor.manifest))
    model = ProgramModel(executor, tokenizer, token_chooser, tiny_lm=tiny_lm, stages=stages)
    give_back_memory()
    give_back_libraries()
    model.load_ms = 1000 * (time.perf_counter() - began)
    return model


def open_program(
    folder: str | Path,
    *,
    level: int = FULL_LEVEL,
    threads: int = 0,
    speculation: SpeculationOptions | None = None,
) -> Engine[ProgramModel]:
    """Opens an engine over a folder of `jaxllm export`; `warm_up` or their first use compiles programs.

    Args:
      level: sub-model of this engine, in percent.
      threads: number of threads of LiteRT; 0 for all cores of this process.
      speculation: options of its drafts, with a folder of programs as `model`; None for no drafts.

    Raises:
      ProgramError: it is not a program folder, corrupt, or of other weights.
      ConfigError: its runtime is not installed, it lacks this level, or it cannot verify drafts.
    """
    model = open_program_model(Path(folder), threads=threads)
    drafts = None if speculation is None else model.drafts(level, speculation, threads=threads)
    return Engine(model, level, drafts)
