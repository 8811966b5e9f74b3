"""An engine over exported programs: opened from their folder, it answers as `serving.Engine` does."""

import time
from collections.abc import Sequence
from pathlib import Path

from jaxllm.programs.manifest import WHOLE, read_tokenizer
from jaxllm.tokenizer import Tokenizer
from serving.answerer import Answerer
from serving.generation import Generation, GenerationConfig, Session
from serving.programs.executor import Executor, open_executor
from serving.programs.table import ProgramTable
from serving.progress import Progress


class ProgramEngine(Answerer):
    """Answers prompts with the programs of one folder, as one level. One answer at a time.

    Attributes:
      executor: runs the programs.
      tokenizer: the model's.
      table: the level's programs, as calls.
      load_ms: time to open the folder and place its weights.
      build_ms: time spent getting programs ready.
    """

    def __init__(self, executor: Executor, tokenizer: Tokenizer, level: int = WHOLE) -> None:
        """See `open`."""
        self.executor, self.tokenizer = executor, tokenizer
        self.table = ProgramTable(executor, level)
        self.load_ms = self.build_ms = 0.0

    @classmethod
    def open(cls, folder: str | Path, *, level: int = WHOLE, threads: int = 0) -> "ProgramEngine":
        """Opens a folder that `jaxllm export` wrote; programs are made ready by `warm_up` or when needed.

        Raises:
          ProgramError: it is no program, corrupt, or of other weights.
          ConfigError: what runs it is not installed, or it has not this level.
        """
        began = time.perf_counter()
        executor = open_executor(Path(folder), threads=threads)
        engine = cls(executor, Tokenizer(read_tokenizer(executor.manifest, Path(folder))), level)
        engine.load_ms = 1000 * (time.perf_counter() - began)
        return engine

    @property
    def name(self) -> str:
        """The model's name, for people."""
        return self.executor.manifest.name

    def at(self, level: int) -> "ProgramEngine":
        """The same programs as another level.

        Raises:
          ConfigError: it was not exported.
        """
        return ProgramEngine(self.executor, self.tokenizer, level)

    def warm_up(
        self, *, prompt_tokens: int | None = None, max_tokens: int = 0, progress: Progress | None = None
    ) -> None:
        """Gets the programs of this level ready: all, or those that one request needs (see
        `serving.Engine.warm_up`)."""
        began = time.perf_counter()
        table = self.table
        if prompt_tokens is None:
            wanted = table.signatures
        else:
            wanted = table.request_signatures(prompt_tokens, max_tokens)
        self.executor.prepare(wanted, progress)
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
        return self._answer(self.table, prompt, config, session)
