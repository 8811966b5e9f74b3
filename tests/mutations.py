"""Breaks the product in one line at a time, and checks that the suite sees it: `make mutations`.

Every mutation is tried in a copy of the repository, with the test files that must catch it. It prints a line
per mutation, and exits 1 where one is not caught, or where its line is no longer there: then update it here.

    python -m tests.mutations                    all of them
    python -m tests.mutations sampling eviction  those whose names contain a word
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", "build", "dist", "site", "*.egg-info", ".*_cache"
)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One wrong line.

    Attributes:
      name: what it breaks.
      file: path of the source.
      old: a part of it that occurs once.
      new: what replaces it.
      tests: arguments of pytest that must fail then.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _mutation(name: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, file, old, new, tests)


MUTATIONS = (
    _mutation(
        "kernels: rows that two blocks share are added twice", "jaxllm/kernels/converted.py",
        "fresh = start + jnp.arange(block_rows, dtype=jnp.int32) >= i * block_rows",
        "fresh = start + jnp.arange(block_rows, dtype=jnp.int32) >= 0", "tests/nn/test_linear.py",
    ),
    _mutation(
        "kernels: a batch's rows use the units of their neighbour", "jaxllm/kernels/native_call.py",
        "value(self.counts)[1 + row]", "value(self.counts)[row]",
        "tests/steps/test_batch.py::test_rows_of_different_levels_share_products",
    ),
    _mutation(
        "kv: a token does not attend to itself", "jaxllm/kv/cache.py",
        "before = row <= self.rows[:, None]", "before = row < self.rows[:, None]", "tests/kv/test_cache.py",
    ),
    _mutation(
        "codecs: the second plane of packed bits is shifted by a bit less", "jaxllm/contexts/coding.py",
        "np.uint8(index * bits)", "np.uint8(index * bits - 1)", "tests/contexts/test_codecs.py",
    ),
    _mutation(
        "tolerance: queries before a token count as its sightings", "jaxllm/contexts/tolerance.py",
        "begin = np.maximum(first, token)", "begin = np.minimum(first, token)",
        "tests/contexts/test_tolerance.py",
    ),
    _mutation(
        "eviction: the most compressed chunks leave first", "jaxllm/contexts/eviction.py",
        "key=lambda each: (-_width(each), each.used, -each.chunk)",
        "key=lambda each: (_width(each), each.used, -each.chunk)", "tests/serving/contexts/test_memory.py",
    ),
    _mutation(
        "catalog: a quota forgets what is stored already", "serving/contexts/store.py",
        "self.used_bytes(owner) + more_bytes > quota", "more_bytes > quota",
        "tests/serving/contexts/test_store.py",
    ),
    _mutation(
        "sampling: frequent tokens are rewarded", "jaxllm/sampling_state.py",
        "logits = logits - state.frequency_penalty", "logits = logits + state.frequency_penalty",
        "tests/test_sampling.py",
    ),
    _mutation(
        "sampling: top-k keeps one token too many", "jaxllm/sampling.py",
        "jnp.where(total >= wanted,", "jnp.where(total > wanted,", "tests/kernels/test_sampling.py",
    ),
    _mutation(
        "speculation: all nodes of a tree are sampled with the root's draw",
        "jaxllm/speculation/tree.py",
        "drawn=sampler.drawn + depth)", "drawn=sampler.drawn)", "tests/speculation",
        "tests/steps/test_trees.py",
    ),
    _mutation(
        "speculation: the threshold rises where all drafts were right", "jaxllm/speculation/token_tree.py",
        "max(LEAST, 0.5 * self.alpha)", "min(MOST, 2 * self.alpha)", "tests/speculation/test_tree.py",
    ),
    _mutation(
        "scheduler: busy apps take the runs that are reserved", "serving/server/scheduler.py",
        "shared = free - options.reserved_running", "shared = free", "tests/serving/server/test_scheduler.py",
    ),
    _mutation(
        "planner: half of the answers may be late", "serving/elastic/objectives.py",
        "place = math.ceil(confidence * len(ascending)) - 1",
        "place = math.ceil(0.5 * confidence * len(ascending)) - 1",
        "tests/serving/elastic/test_planner.py",
    ),
    _mutation(
        "elastic: a level's knapsack never gets full", "jaxllm/elastic/ladder.py",
        "room -= size", "room -= 0", "tests/elastic/test_submodel.py",
    ),
    _mutation(
        "tokenizer: a printable byte is spelled as another", "jaxllm/text/tokenizer.py",
        "*range(0xA1, 0xAD)", "*range(0xA0, 0xAD)", "tests/text/test_tokenizer.py",
    ),
    _mutation(
        "templates: a conversation may spell special tokens", "jaxllm/text/marked_text.py",
        "return MarkedText(_text(codes), marked)", "return MarkedText(_text(codes), marked & False)",
        "tests/text/test_control_tokens.py",
    ),
    _mutation(
        "export: short caches are exported with the whole context", "export/signatures.py",
        "return signature.cache_tokens or self.context_tokens", "return self.context_tokens",
        "tests/export/test_stablehlo.py::test_caches_are_as_short_as_a_sequence_and_grow_with_it",
    ),
    _mutation(
        "quantization: scales saturate the largest weights", "jaxllm/quant/formats.py",
        "scale = np.abs(values).max(-1, keepdims=True) / 127.0",
        "scale = np.abs(values).max(-1, keepdims=True) / 190.0", "tests/quant/test_formats.py",
    ),
    _mutation(
        "training: norms and biases decay", "training/loop/optimizer.py",
        'not name.endswith((".scale", "bias"))', 'not name.endswith((".scales", "biases"))',
        "tests/training/loop/test_trainer.py::test_weight_decay_is_on_matrices_only",
    ),
    _mutation(
        "kv: a window is one token too wide", "jaxllm/kv/cache.py",
        "self.positions[:, None] - window)", "self.positions[:, None] - window - 1)",
        "tests/kv/test_cache.py",
    ),
    _mutation(
        "API: a request may ask for any number of answers", "serving/server/api/answers.py",
        "if not 1 <= number <= limit:", "if number < 1:", "tests/serving/server/api/test_requests.py",
    ),
    _mutation(
        "training: distillation counts the target twice", "training/loop/losses.py",
        "rest = np.float32(1) - share", "rest = np.float32(1)", "tests/training/loop/test_trainer.py",
    ),
)  # fmt: skip


def caught(mutation: Mutation, folder: Path) -> bool:
    """Whether tests fail with a mutation in a copy of the repository, which is then as it was.

    Raises:
      ValueError: the line that it changes does not occur once, or its tests do not pass without it.
    """
    path = folder / mutation.file
    before = path.read_text(encoding="utf-8")
    if before.count(mutation.old) != 1:
        raise ValueError(f"{mutation.file} has {before.count(mutation.old)} times: {mutation.old}")
    if (told := failure_of(mutation.tests, folder)) is not None:
        raise ValueError(f"its tests do not pass without it: {told}")
    path.write_text(before.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        return failure_of(mutation.tests, folder) is not None
    finally:
        path.write_text(before, encoding="utf-8")


def failure_of(tests: tuple[str, ...], folder: Path) -> str | None:
    """The end of what pytest prints where tests in a folder fail or are all skipped; None where they pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    data = os.environ.get("JAXLLM_DATA", str(ROOT.parent / "shared" / "data"))
    environment = {**os.environ, "JAXLLM_DATA": data}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    passed = done.returncode == 0 and " passed" in done.stdout
    return None if passed else f"{done.stdout[-1500:]}{done.stderr[-500:]}".strip()


def main() -> int:
    """Tries the mutations whose names contain one of the words of the command line."""
    parser = argparse.ArgumentParser(prog="tests.mutations", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="of names of mutations; none for all")
    words = parser.parse_args().words
    chosen = [each for each in MUTATIONS if not words or any(word in each.name for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "repository"
        shutil.copytree(ROOT, folder, symlinks=True, ignore=_LEFT_OUT)
        for each in chosen:
            began = time.monotonic()
            try:
                verdict = "caught" if caught(each, folder) else "NOT CAUGHT"
            except ValueError as error:
                verdict = f"NOT TRIED ({error})"
            missed += verdict != "caught"
            print(f"{verdict}: {each.name} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations caught")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
