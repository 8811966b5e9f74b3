"""An engine over exported programs: opened from their folder, it answers as `serving.Engine` does."""

import time
from collections.abc import Sequence
from pathlib import Path

from jaxllm.config import WHOLE
from jaxllm.programs.manifest import read_tokenizer
from jaxllm.tokenizer import Tokenizer
from serving.answerer import Answerer
from serving.forked import require_not_forked, watch_for_forks
from serving.generation import Generation, GenerationConfig, Session
from serving.programs.choosing import Choosing
from serving.programs.drafts import ProgramRounds, drafted
from serving.programs.executor import Executor, kept_executables, open_executor
from serving.programs.table import ProgramTable
from serving.progress import Progress
from serving.speculative.options import SpeculationOptions


class ProgramEngine(Answerer):
    """Answers prompts with the programs of one folder, as one level.

    Threads may share it, as they may an `Engine`: answers take turns piece by piece.

    Attributes:
      executor: runs the programs.
      tokenizer: the model's.
      table: the level's programs, as calls.
      speculative: what drafts its answers; None where nothing does.
      load_ms: time to open the folder and place its weights.
      build_ms: time spent getting programs ready.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        level: int = WHOLE,
        choosing: Choosing | None = None,
    ) -> None:
        """See `open`; `choosing` draws tokens, None compiles what does."""
        watch_for_forks()
        self.executor, self.tokenizer = executor, tokenizer
        self.table = ProgramTable(executor, level, choosing)
        self.speculative: ProgramRounds | None = None
        self.load_ms = self.build_ms = 0.0

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        level: int = WHOLE,
        threads: int = 0,
        speculation: SpeculationOptions | None = None,
    ) -> "ProgramEngine":
        """Opens a folder that `jaxllm export` wrote; programs are made ready by `warm_up` or when needed.

        Args:
          folder: the folder.
          level: the sub-model to be, in percent.
          threads: that LiteRT computes with; 0 for all cores of this process.
          speculation: how drafts speed its answers up (see `drafts.drafted`); None for no drafts.

        Raises:
          ProgramError: it is no program, corrupt, or of other weights.
          ConfigError: what runs it is not installed, it has not this level, or verifies no drafts.
        """
        require_not_forked()
        began = time.perf_counter()
        executor = open_executor(Path(folder), threads=threads)
        tokenizer = Tokenizer(read_tokenizer(executor.manifest, Path(folder)))
        choosing = Choosing(executor.manifest.levels[WHOLE].cfg.vocab_size, kept_executables())
        engine = cls(executor, tokenizer, level, choosing)
        if speculation is not None:
            engine.speculative = drafted(engine.table, engine.tokenizer, speculation, threads=threads)
        engine.load_ms = 1000 * (time.perf_counter() - began)
        return engine

    @property
    def name(self) -> str:
        """The model's name, for people."""
        return self.executor.manifest.name

    def at(self, level: int) -> "ProgramEngine":
        """The same programs as another level, without drafts.

        Raises:
          ConfigError: it was not exported.
        """
        return ProgramEngine(self.executor, self.tokenizer, level, self.table.choosing)

    def warm_up(
        self, *, prompt_tokens: int | None = None, max_tokens: int = 0, progress: Progress | None = None
    ) -> None:
        """Gets the programs of this level ready: all, or those that one request needs (see
        `serving.Engine.warm_up`); and what chooses their tokens, greedy or drawn. Nothing is compiled under
        such a request."""
        with self.table.lock:
            self._warm_up(prompt_tokens, max_tokens, progress)

    def _warm_up(self, prompt_tokens: int | None, max_tokens: int, progress: Progress | None) -> None:
        began = time.perf_counter()
        table, drafts = self.table, self.speculative
        table.choosing.prepare(() if drafts is None else drafts.tree_sizes)
        if drafts is not None and prompt_tokens is None:
            drafts.prepare_all(progress)
        elif drafts is not None and prompt_tokens is not None:
            drafts.prepare(prompt_tokens, max_tokens, progress)
        elif prompt_tokens is None:
            self.executor.prepare(table.signatures, progress)
        else:
            self.executor.prepare(table.request_signatures(prompt_tokens, max_tokens), progress)
        self.build_ms += 1000 * (time.perf_counter() - began)

    def stream(
        self,
        prompt: str | Sequence[int],
        config: GenerationConfig | None = None,
        *,
        session: Session | None = None,
    ) -> Generation:
        """Answers a prompt: text (special tokens are added) or token ids (see `serving.Engine.stream`).

        Raises:
          ConfigError, ContextOverflow: the prompt is empty, malformed or too long.
        """
        return self._answer(self.speculative or self.table, prompt, config, session)
