"""Measures preparing a folder of floats and GGUF files of the same weights: time and peak memory, each in a
process of its own; then the speed of the bundles beside those prepared from floats at the same bits, in
alternation; and perplexities beside llama.cpp's on the same files.

The tokenizer of byte pairs of a random model has as many entries as published models have. Merges are learned
of texts as those of published tokenizers are. Texts of some ten megabytes have about 128,000 words; where
they have fewer, tokens that are joined at random fill the vocabulary: they never occur, but are read, checked
and stored as the others are.
"""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.harness.bench import Run
from benchmarks.harness.children import taken_by
from benchmarks.harness.report import Row, compared, row
from benchmarks.models import Checkpoint, shape, write_random
from benchmarks.peers import OURS, PEERS, Opening, process
from benchmarks.peers.llama import PACKAGE_TYPES, gguf_of
from benchmarks.peers.ours import BLOCKS
from benchmarks.peers.peer import missing_packages
from benchmarks.prepare import Plan
from benchmarks.samples import SEPARATOR, stories_file
from jaxllm.bundle import Bundle
from jaxllm.checkpoints.gguf_file import read_gguf
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import parameter_count
from jaxllm.prepare import prepare
from jaxllm.serving.host.user_cache import cache_folder
from jaxllm.text.tokenizer import TokenizerFiles

FROM_FLOATS, LLAMA_CPP = f"{OURS.name}-from-floats", "llama.cpp"
# Peak memory may be this many times the file's size, and a layer more.
_BOUND = 1.2


def run(bench: Run[Plan]) -> list[Row]:
    """Measures one model."""
    plan, progress = bench.plan, bench.progress
    threads, kinds = process.threads_of(plan.threads), _kinds(bench)
    if bench.shape is not None:
        name, (folder, vocabulary) = bench.shape, random_source(bench.shape, SHAPES[bench.shape], bench)
    else:
        found = Checkpoint.find(bench.path())
        name, folder, vocabulary = found.name, found.folder(progress), None
    checkpoint = Checkpoint.find(folder)
    how = {"progress": progress, "by_package": PACKAGE_TYPES, "vocabulary": vocabulary}
    written = partial(gguf_of, folder, threads=threads, **how)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="jaxllm-prepare-") as scratch:
        bundles: dict[str, dict[str, Path]] = {}
        for number, kind in enumerate(kinds):
            form = FORMATS[kind]
            made, floats = Path(scratch, f"{kind}.jaxllm"), Path(scratch, f"{form}.jaxllm")
            bundles[kind] = {OURS.name: made, FROM_FLOATS: floats}
            gguf = written(kind)
            prepared: list[tuple[str, Path, Path, str | None]] = [(f"GGUF {kind}", gguf, made, None)]
            if not floats.exists():
                prepared.append((f"floats to {form}", folder, floats, form))
            for what, *each in prepared:
                rows += _memory_rows(f"{name}, prepare from {what}", each, checkpoint.cfg, threads)
            progress("Preparing", number + 1, len(kinds))
        if "memory" not in plan.parts:
            rows = []
        text, exact = None, 0.0
        if "perplexity" in plan.parts:
            text = process.Text.read(
                plan.text or stories_file(None), checkpoint, separator=SEPARATOR,
                window_tokens=plan.context_tokens, limit=plan.text_windows,
            )  # fmt: skip
            with process.Child(process.REFERENCE, _opening(folder, plan), progress) as child:
                exact = process.perplexity(child, text, progress)
        for kind, both in bundles.items():
            case = f"{name} {kind}"
            if "speed" in plan.parts:
                openings = {system: _opening(bundle, plan) for system, bundle in both.items()}
                with process.opened(openings, progress, case) as children:
                    systems = [process.System(each, child, (BLOCKS,)) for each, child in children.items()]
                    vocab_size = checkpoint.cfg.vocab_size
                    results = process.alternate(systems, vocab_size, plan=plan, progress=progress)
                    bits = {
                        system: f"{child.facts['bits_per_weight']:.2f} bits"
                        for system, child in children.items()
                    }
                # Each file's bundle beside that of floats.
                rows += process.rate_rows(results, both, plan, f"{case}, ", notes=bits)
            if text is not None:
                rows += _perplexity_rows(case, both, written(kind), text, exact, bench)
    return rows


def _kinds(bench: Run[Plan]) -> tuple[str, ...]:
    """The types of files that can be written here."""
    wanted: tuple[str, ...] = bench.plan.kinds
    if missing := missing_packages("gguf"):
        raise ConfigError(f"{missing} is not installed: pip install 'jaxllm[gguf]'")
    if "Q4_K" in wanted and missing_packages(*PEERS[LLAMA_CPP].packages):
        bench.tell("without Q4_K, which llama.cpp's quantizer writes: pip install 'jaxllm[peers]'")
        return tuple(each for each in wanted if each != "Q4_K")
    return wanted


def _memory_rows(case: str, how: Sequence[Any], cfg: ModelConfig, threads: int) -> list[Row]:
    """Time and peak memory of preparing a source, and sizes."""
    model, bundle, weights = how
    prepared = partial(prepare, weights=weights)
    found = taken_by(prepared, model, bundle, environment=process.environment_of(threads))
    files = [model] if model.is_file() else [*model.glob("*.safetensors")]
    file_bytes = sum(each.stat().st_size for each in files)
    # A layer as it is in the file.
    shallow = dataclasses.replace(
        cfg, layers=cfg.layers - 1, attention_windows=(cfg.attention_windows or ())[:-1]
    )
    share = 1 - parameter_count(shallow) / parameter_count(cfg)
    bound = _BOUND * file_bytes + share * file_bytes
    note = (
        f"above {found.idle_bytes / 1e6:.0f} MB of Python and JAX, with mapped pages; "
        f"{(found.peak_bytes + found.idle_bytes) / 1e6:.0f} MB in all; the file has {file_bytes / 1e6:.0f} MB"
    )
    beside = {"baseline": f"{_BOUND} files and a layer", "ratio": bound / max(1, found.peak_bytes)}
    return [
        row(case, "build_ms", 1000 * found.took_s, f"{found.cpu_s:.1f} s of processors"),
        row(case, "peak_memory_bytes", found.peak_bytes, note, **beside),
        row(case, "file_bytes", bundle.stat().st_size),
    ]


def _perplexity_rows(
    case: str, bundles: dict[str, Path], gguf: Path, text: process.Text, exact: float, bench: Run[Plan]
) -> list[Row]:
    """Perplexity of a file, of floats at its bits, of float32, and of llama.cpp on the file."""
    openings = {system: _opening(bundle, bench.plan) for system, bundle in bundles.items()}
    if not missing_packages(*PEERS[LLAMA_CPP].packages):
        openings[LLAMA_CPP] = process.opening_of(bench.plan, LLAMA_CPP, gguf, "GGUF")
    values = {process.REFERENCE: exact}
    # One after the other: each is in memory for its own text alone.
    for system, opening in openings.items():
        with process.Child(f"{system} {case}", opening, bench.progress) as child:
            values[system] = process.perplexity(child, text, bench.progress)
    # llama.cpp's quantizer gives rows that do not divide into blocks of a type another one.
    kinds = {each.kind for each in read_gguf(gguf).tensors.values() if len(each.shape) > 1}
    notes = dict.fromkeys((OURS.name, LLAMA_CPP), f"matrices of {' and '.join(sorted(kinds))}")
    return compared(f"{case}, {text.name}, {text.tokens} tokens", "perplexity", values, notes)


def _opening(model: Path, plan: Plan) -> Opening:
    """Our engine on a folder of floats, or on a bundle at its own width."""
    form = "f32"
    if not model.is_dir():
        with Bundle.open(model) as bundle:
            form = bundle.layout.weights
    return process.opening_of(plan, OURS.name, model, form, context_tokens=plan.context_tokens)


SHAPES = {
    # The layers of Qwen2.5 0.5B with the vocabulary of Llama 3, whose embedding is the head, too.
    "0.5b-128k": shape(D=896, L=24, N=14, K=2, H=64, F=4864, V=128256, tied_head=True),
}
# Type of a GGUF file -> our format of floats that has the same bits.
FORMATS = {"F16": "f32", "Q8_0": "int8", "Q4_0": "int4-all", "Q4_1": "int4", "Q4_K": "int4"}
# Changes whenever the same source would be written otherwise.
_VERSION = 1


def random_source(name: str, cfg: ModelConfig, bench: Run[Plan]) -> tuple[Path, dict[str, Any]]:
    """The folder of a model of random weights and a tokenizer of byte pairs learned of texts, and what GGUF
    files say of the latter; reports its sources."""
    data = bench.plan.vocabulary_data
    texts = [stories_file(None)]
    if data is not None:
        kinds = (".txt", ".json", ".jsonl", ".csv", ".de", ".en")
        texts = [each for each in sorted(data.rglob("*")) if each.suffix in kinds and each.is_file()]
    place = cache_folder() / "benchmarks" / "prepare" / (name if data is None else f"{name}-data")
    size_bytes = sum(each.stat().st_size for each in texts)
    folder = place / f"v{_VERSION}-{cfg.vocab_size}-{len(texts)}-{size_bytes}"
    if not (folder / "config.json").exists():
        # Earlier ones are of other texts.
        shutil.rmtree(place, ignore_errors=True)
        tokenizer, learned = byte_pairs(cfg.vocab_size, texts)
        folder.mkdir(parents=True)
        (folder / "learned.txt").write_text(f"{learned}\n", encoding="utf-8")
        write_random(folder, cfg, bench.progress, tokenizer)
    learned = int((folder / "learned.txt").read_text(encoding="utf-8"))
    of = f"{len(texts)} texts of {size_bytes / 1e6:.1f} MB"
    bench.tell(f"{cfg.vocab_size:,} byte pairs, {learned:,} learned of {of}")
    return folder, vocabulary_keys(read_tokenizer(folder))


# Llama 3's rule by which texts are split first, and llama.cpp's name of it.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_NAME = "llama-bpe"


def byte_pairs(size: int, texts: Iterable[Path]) -> tuple[TokenizerFiles, int]:
    """A tokenizer of `size` entries, and how many of them were learned of the texts."""
    library = Tokenizer(models.BPE(ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=1, special_tokens=[], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    library.train([str(each) for each in texts], trainer)
    data = json.loads(library.to_str())
    learned = len(data["model"]["vocab"])
    # Tokens that are joined at random, until there are enough.
    vocabulary, draw = data["model"]["vocab"], np.random.default_rng(0)
    tokens = list(vocabulary)
    while len(tokens) < size:
        left, right = (tokens[int(at)] for at in draw.integers(0, len(tokens), 2))
        token = left + right
        if len(token) <= 16 and token not in vocabulary:
            vocabulary[token] = len(tokens)
            tokens.append(token)
            data["model"]["merges"].append([left, right])
    return TokenizerFiles(tokenizer_json=json.dumps(data, ensure_ascii=False)), learned


def vocabulary_keys(files: TokenizerFiles) -> dict[str, Any]:
    """The metadata of such a tokenizer in a GGUF file, without the prefix `tokenizer.ggml.`."""
    model = json.loads(files.tokenizer_json)["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "model": "gpt2",
        "pre": _SPLIT_NAME,
        "tokens": tokens,
        "token_type": [1] * len(tokens),
        "merges": [" ".join(each) for each in model["merges"]],
        "add_bos_token": False,
    }
