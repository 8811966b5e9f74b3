"""Measures preparing a folder of floats and GGUF files of the same weights: time and peak memory, each in a
process of its own; then the speed of the bundles beside those prepared from floats at the same bits, in
alternation; and perplexities beside llama.cpp's on the same files.

Makes what is prepared: a model's folder, and GGUF files of the same weights; kept in the cache folder.
"""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.children import taken_by
from benchmarks.harness.plan import silent, sized, unheard
from benchmarks.harness.report import Row, compared, row
from benchmarks.models import Checkpoint, Shape, byte_pairs, texts_of, vocabulary_keys, write_random
from benchmarks.peers import OURS, PEERS, Opening
from benchmarks.peers.gguf_file import PACKAGE_TYPES, quantize_gguf, refusal, write_gguf
from benchmarks.peers.llama import content_key
from benchmarks.peers.ours import BLOCKS
from benchmarks.peers.process import (
    REFERENCE,
    Child,
    System,
    Text,
    TimedPlan,
    alternate,
    environment_of,
    opened,
    perplexity,
    prompt_ids,
    threads_of,
)
from benchmarks.prepare import PARTS
from benchmarks.samples import SEPARATOR, stories_file
from jaxllm.bundle import Bundle
from jaxllm.checkpoints.gguf_file import read_gguf
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import parameter_count
from jaxllm.prepare import prepare
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.host.user_cache import cache_folder

FROM_FLOATS, LLAMA_CPP = f"{OURS.name}-from-floats", "llama.cpp"
# Of which peak memory may be this many times the file's size, and a layer more.
_BOUND = 1.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(TimedPlan):
    """What is measured, and how long.

    Attributes:
      kinds: types of GGUF files, keys of `FORMATS`.
      parts: of `PARTS`.
      context_tokens: of the engines.
    """

    kinds: tuple[str, ...] = sized(("F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K"), quick=("Q8_0", "Q4_0"))
    parts: tuple[str, ...] = tuple(PARTS)
    prompt_tokens: tuple[int, ...] = sized((64, 256), quick=(64,))
    decode_tokens: int = sized(64, quick=32)
    rounds: int = sized(7, quick=3)
    context_tokens: int = 512
    text_windows: int = sized(256, quick=8)
    patience_s: float = sized(120.0, quick=5.0)


def run(
    model: Path | str,
    plan: Plan,
    *,
    data: Path | None = None,
    text: Path | None = None,
    progress: Progress = silent,
    tell: Callable[[str], None] = unheard,
) -> list[Row]:
    """Measures one model.

    Args:
      model: a bundle or a Hugging Face folder, or the name of one of `SHAPES`: random weights.
      plan: what is measured.
      data: a folder of data sets, of whose texts the tokenizer of a shape is learned.
      text: whose perplexity is measured; None for the packaged stories.
      progress: called with (stage, done, total).
      tell: called with messages for the user.

    Raises:
      JaxllmError: the model cannot be written as GGUF, or a system fails.
    """
    threads = threads_of(plan.threads)
    kinds = _kinds(plan.kinds, tell)
    if isinstance(model, str):
        source = random_source(model, SHAPES[model], data, progress, tell)
    else:
        found = Checkpoint.find(model)
        source = Source(name=found.name, folder=found.folder(progress))
    checkpoint = Checkpoint.find(source.folder)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="jaxllm-prepare-") as scratch:
        bundles: dict[tuple[str, str], Path] = {}
        for number, kind in enumerate(kinds):
            path = source.gguf(kind, threads, progress)
            prepared = Path(scratch, f"{kind}.jaxllm"), Path(scratch, f"{FORMATS[kind]}.jaxllm")
            bundles[kind, OURS.name], bundles[kind, FROM_FLOATS] = prepared
            rows += _memory_rows(
                source.name, f"GGUF {kind}", path, prepared[0], None, checkpoint.cfg, threads
            )
            if not prepared[1].exists():
                form, folder = FORMATS[kind], source.folder
                name = f"floats to {form}"
                rows += _memory_rows(source.name, name, folder, prepared[1], form, checkpoint.cfg, threads)
            progress("Preparing", number + 1, len(kinds))
        if "memory" not in plan.parts:
            rows = []
        scored = None
        if "perplexity" in plan.parts:
            scored = _Scored.of(text or stories_file(None), source, checkpoint, plan, progress)
        for kind in kinds:
            both = {system: bundles[kind, system] for system in (OURS.name, FROM_FLOATS)}
            if "speed" in plan.parts:
                rows += _speed_rows(f"{source.name} {kind}", both, checkpoint, plan, progress)
            if scored is not None:
                gguf = source.gguf(kind, threads, progress)
                rows += _perplexity_rows(f"{source.name} {kind}", both, gguf, scored, plan, progress)
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scored:
    """A text, and its perplexity by the model's floats in float32."""

    text: Text
    floats: float

    @classmethod
    def of(
        cls, path: Path, source: "Source", checkpoint: Checkpoint, plan: Plan, progress: Progress
    ) -> "_Scored":
        text = Text.read(
            path,
            checkpoint,
            separator=SEPARATOR,
            window_tokens=plan.context_tokens,
            limit=plan.text_windows,
        )
        with Child(REFERENCE, _opening(source.folder, plan), progress) as child:
            return cls(text=text, floats=perplexity(child, text, progress))


def _kinds(wanted: tuple[str, ...], tell: Callable[[str], None]) -> tuple[str, ...]:
    """The types of files that can be written here."""
    from benchmarks.peers.peer import missing_packages

    if missing := missing_packages("gguf"):
        raise ConfigError(f"{missing} is not installed: pip install 'jaxllm[gguf]'")
    if "Q4_K" in wanted and PEERS[LLAMA_CPP].missing():
        tell("without Q4_K, which llama.cpp's quantizer writes: pip install 'jaxllm[peers]'")
        return tuple(each for each in wanted if each != "Q4_K")
    return wanted


def _memory_rows(
    name: str, what: str, model: Path, bundle: Path, weights: str | None, cfg: ModelConfig, threads: int
) -> list[Row]:
    """Time and peak memory of preparing a source, and sizes."""
    found = taken_by(_prepared, model, bundle, weights, environment=environment_of(threads))
    files = [model] if model.is_file() else [*model.glob("*.safetensors")]
    file_bytes = sum(each.stat().st_size for each in files)
    # A layer as it is in the file.
    shallow = dataclasses.replace(cfg, layers=cfg.layers - 1, **_shortened(cfg))
    share = 1 - parameter_count(shallow) / parameter_count(cfg)
    bound = _BOUND * file_bytes + share * file_bytes
    above, case = found.peak_bytes, f"{name}, prepare from {what}"
    note = (
        f"above {found.idle_bytes / 1e6:.0f} MB of Python and JAX, with mapped pages; "
        f"{(found.peak_bytes + found.idle_bytes) / 1e6:.0f} MB in all; the file has {file_bytes / 1e6:.0f} MB"
    )

    beside = {"baseline": f"{_BOUND} files and a layer", "ratio": bound / max(1, above)}
    return [
        row(case, "build_ms", 1000 * found.took_s, f"{found.cpu_s:.1f} s of processors"),
        row(case, "peak_memory_bytes", above, note, **beside),
        row(case, "file_bytes", bundle.stat().st_size),
    ]


def _prepared(model: Path, bundle: Path, weights: str | None) -> None:
    prepare(model, bundle, weights=weights)  # pyright: ignore[reportArgumentType]: one of the formats


def _shortened(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """What has an entry for each layer, for a layer less."""
    return {"attention_windows": cfg.attention_windows[:-1]} if cfg.attention_windows else {}


def _speed_rows(
    case: str, bundles: dict[str, Path], checkpoint: Checkpoint, plan: Plan, progress: Progress
) -> list[Row]:
    """Prefill and decode of a file's bundle beside that of floats."""
    openings = {system: _opening(bundle, plan) for system, bundle in bundles.items()}
    with opened(openings, progress, case) as children:
        results = alternate(
            [System(system, child, (BLOCKS,)) for system, child in children.items()],
            [prompt_ids(checkpoint.cfg.vocab_size, tokens) for tokens in plan.prompt_tokens],
            plan=plan,
            progress=progress,
        )
        bits = {system: f"{child.facts['bits_per_weight']:.2f} bits" for system, child in children.items()}
    rows, decoded = [], plan.decode_tokens
    for tokens in plan.prompt_tokens:
        rates = {system: results[system, tokens].rates(tokens, decoded) for system in bundles}
        for what, metric in (
            (f"prompt {tokens}", "prefill_tokens_per_s"),
            (f"decode {decoded} after {tokens}", "decode_tokens_per_s"),
        ):
            values = {system: each[metric] for system, each in rates.items()}
            rows += compared(f"{case}, {what}", metric, values, bits)
    return rows


def _perplexity_rows(
    case: str,
    bundles: dict[str, Path],
    gguf: Path,
    scored: _Scored,
    plan: Plan,
    progress: Progress,
) -> list[Row]:
    """Perplexity of a file, of floats at its bits, of float32, and of llama.cpp on the file."""

    openings = {system: _opening(bundle, plan) for system, bundle in bundles.items()}
    if not PEERS[LLAMA_CPP].missing():
        openings[LLAMA_CPP] = _opening(gguf, plan, peer=LLAMA_CPP)
    values, text = {REFERENCE: scored.floats}, scored.text
    # One after the other: each is in memory for its own text alone.
    for system, opening in openings.items():
        with Child(f"{system} {case}", opening, progress) as child:
            values[system] = perplexity(child, text, progress)
    # llama.cpp's quantizer gives rows that do not divide into blocks of a type another one.
    kinds = {each.kind for each in read_gguf(gguf).tensors.values() if len(each.shape) > 1}
    note = f"matrices of {' and '.join(sorted(kinds))}"
    return compared(
        f"{case}, {text.name}, {text.tokens} tokens",
        "perplexity",
        values,
        {OURS.name: note, LLAMA_CPP: note},
        ours=OURS.name,
    )


def _opening(model: Path, plan: Plan, *, peer: str = OURS.name) -> Opening:
    if peer != OURS.name:
        form = "GGUF"
    elif model.is_dir():
        form = "f32"
    else:
        with Bundle.open(model) as bundle:
            form = bundle.layout.weights
    context = plan.context_tokens
    own = {"context_tokens": context} if peer == OURS.name else {}
    return Opening(
        peer=peer,
        model=model,
        format=form,
        threads=threads_of(plan.threads),
        context_tokens=context,
        options=own,
    )


SHAPES = {
    # The layers of Qwen2.5 0.5B with the vocabulary of Llama 3, whose embedding is the head, too.
    "0.5b-128k": Shape(D=896, L=24, N=14, K=2, H=64, F=4864, V=128256, tied=True),
}
# Type of a GGUF file -> our format of floats that has the same bits.
FORMATS = {"F16": "f32", "Q8_0": "int8", "Q4_0": "int4-all", "Q4_1": "int4-min", "Q4_K": "int4-min"}
# Changes whenever the same source would be written otherwise.
_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A model as a folder of floats, and as GGUF files.

    Attributes:
      name: of the model.
      folder: the Hugging Face folder.
      vocabulary: metadata of its tokenizer in GGUF files; None for one character a token.
    """

    name: str
    folder: Path
    vocabulary: dict[str, Any] | None = None

    def gguf(self, kind: str, threads: int, progress: Progress) -> Path:
        """The GGUF file of a type, a key of `FORMATS`, made unless it is there.

        Raises:
          ConfigError: the model cannot be written as one.
        """
        from jaxllm.checkpoints.huggingface import read_config, read_params

        place = _cache() / "gguf" / content_key(self.folder)
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{kind}.gguf"
        if path.exists():
            return path
        cfg = read_config(self.folder)
        if reason := refusal(cfg):
            raise ConfigError(f"{self.folder}: {reason}")
        own = kind if kind in PACKAGE_TYPES else "F32"
        written = place / f"{own}.gguf"
        if not written.exists():
            params = read_params(self.folder, cfg)
            write_gguf(written, cfg, params, progress, kind=own, vocabulary=self.vocabulary)
        if written != path:
            quantize_gguf(written, path, kind, threads)
            written.unlink()
        return path


def random_source(
    name: str, shape: Shape, data: Path | None, progress: Progress, tell: Callable[[str], None]
) -> Source:
    """A model of random weights, and a tokenizer of byte pairs learned of texts.

    Args:
      name: of the shape.
      shape: its sizes.
      data: a folder of data sets, whose texts are learned; None for the packaged stories.
      progress: called with ("Drawing weights", parameters drawn, parameters in all).
      tell: called with what the tokenizer is made of.
    """
    texts = [stories_file(None)] if data is None else list(texts_of(data))
    place = _cache() / (name if data is None else f"{name}-data")
    size_bytes = sum(each.stat().st_size for each in texts)
    folder = place / f"v{_VERSION}-{shape.V}-{len(texts)}-{size_bytes}"
    if not (folder / "config.json").exists():
        # Earlier ones are of other texts.
        shutil.rmtree(place, ignore_errors=True)
        tokenizer, learned = byte_pairs(shape.V, texts)
        folder.mkdir(parents=True)
        (folder / "learned.txt").write_text(f"{learned}\n", encoding="utf-8")
        write_random(folder, shape.cfg, progress, tokenizer)
    from jaxllm.checkpoints.tokenizer_folder import read_tokenizer

    learned = int((folder / "learned.txt").read_text(encoding="utf-8"))
    megabytes = size_bytes / 1e6
    tell(f"{shape.V:,} byte pairs, {learned:,} learned of {len(texts)} texts of {megabytes:.1f} MB")
    return Source(name=name, folder=folder, vocabulary=vocabulary_keys(read_tokenizer(folder)))


def _cache() -> Path:
    return cache_folder() / "benchmarks" / "prepare"
