"""Measures parts of TFLite programs by themselves: sampling inside of programs, and W8A8 with its shadow."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.export.formats import LLAMA_CPP, TFLITE, Tell, exported
from benchmarks.measuring.report import Row, compared
from benchmarks.models.checkpoint import Checkpoint
from benchmarks.peers import PEERS, Opening
from benchmarks.peers.alternation import Result, System, alternate, prompt_ids
from benchmarks.peers.process import Child
from benchmarks.peers.programs import DRAWN, GREEDY
from jaxllm.bundle import Bundle
from jaxllm.text.tokenizer import Tokenizer
from serving.host.progress import Progress

BLOCK_TOKENS = 16
SHADOW = f"{TFLITE['w8a8']}-shadow"
_SUFFIX = "-blocks"
_CALIBRATION_BYTES = 1 << 16
_CALIBRATION_WORDS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one measurement.

    Attributes:
      prompt_tokens: lengths of prompts.
      decode_tokens: decoded after each of them.
      rounds: of which medians are taken.
      context_tokens: most.
      patience_s: for repeating what other processes disturbed, in all.
      threads: that every system may compute with.
    """

    prompt_tokens: tuple[int, ...]
    decode_tokens: int
    rounds: int
    context_tokens: int
    patience_s: float
    threads: int

    def export_options(self, lengths: Sequence[int] = (16, 64, 256)) -> list[str]:
        """The options of an export of these sizes, with one length of caches and chunks of `lengths`."""
        chunks = (
            part for each in lengths if each <= self.context_tokens for part in ("--chunk-tokens", each)
        )
        return [str(each) for each in ("--context", self.context_tokens, "--cache-tokens", 0, *chunks)]


def sampling_rows(bundle: Path, precisions: Sequence[str], sizes: Sizes, progress: Progress) -> list[Row]:
    """Decoding by programs of `BLOCK_TOKENS` tokens with sampling inside, beside the same model by a dispatch
    for each token with NumPy's sampling; greedy, and drawn.

    Args:
      bundle: of float weights.
      precisions: of `TFLITE`.
      sizes: of the measurement; prompts have the first length.
      progress: called with (stage, done, total).
    """
    openings, scratch = {}, Path()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for precision in precisions:
            for suffix, block in (("", 0), (_SUFFIX, BLOCK_TOKENS)):
                name = f"{TFLITE[precision]}{suffix}"
                options = ["--format", "tflite", "--precision", precision, "--block-tokens", block]
                made = exported(bundle, scratch / name, [*options, *sizes.export_options()])
                openings[name] = _opening("device-programs", made.path, "", sizes)
        with _opened(openings, progress) as children:
            systems = [
                System(f"{name} {how}", child, (how,))
                for name, child in children.items()
                for how in (GREEDY, DRAWN)
            ]
            results, prompt = _alternated(systems, bundle, sizes, sizes.prompt_tokens[:1], progress)
    rows = []
    for precision in precisions:
        for how in (GREEDY, DRAWN):
            rates = {
                each: 1000 * sizes.decode_tokens / results[f"{each} {how}", prompt].decode_ms
                for each in (f"{TFLITE[precision]}{_SUFFIX}", TFLITE[precision])
            }
            rows += compared(
                rates,
                ours=f"{TFLITE[precision]}{_SUFFIX}",
                case=f"decode {sizes.decode_tokens} after {prompt}, {how}",
                metric="decode_tokens_per_s",
                unit="tokens/s",
            )
    return rows


def shadow_rows(integer: Path, text: Path | None, sizes: Sizes, progress: Progress, tell: Tell) -> list[Row]:
    """Prefill by W8A8 programs with the shadow of a calibrated bundle, beside those without, the int8
    programs, and llama.cpp.

    Args:
      integer: a calibrated bundle.
      text: its end gives the steps of outputs; None for words of the model's.
      sizes: of the measurement.
      progress: called with (stage, done, total).
      tell: called with a line for what is left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        part = calibration_text(integer, text, scratch)
        static = ["--precision", "w8a8", "--calibration-text", part]
        forms = {
            SHADOW: static,
            TFLITE["w8a8"]: [*static, "--without-shadow"],
            TFLITE["int8"]: ["--precision", "int8"],
        }
        openings = {}
        for name, options in forms.items():
            made = exported(
                integer, scratch / name, ["--format", "tflite", *options, *sizes.export_options()]
            )
            openings[name] = _opening("programs", made.path, "", sizes)
        missing = PEERS[LLAMA_CPP].missing()
        if missing is None:
            floats = Checkpoint.find(integer).folder(progress)
            openings[LLAMA_CPP] = _opening(LLAMA_CPP, floats, "Q8_0", sizes)
        else:
            tell(f"without {LLAMA_CPP}: {missing} is not installed (pip install 'jaxllm[peers]')")
        with _opened(openings, progress) as children:
            systems = [System(name, child, tuple(child.settings)) for name, child in children.items()]
            results, _ = _alternated(systems, integer, sizes, sizes.prompt_tokens, progress)
    rows = []
    for prompt in {length for _, length in results}:
        rates = {name: 1000 * prompt / results[name, prompt].prefill_ms for name in openings}
        case = f"prompt {prompt}"
        rows += compared(rates, ours=SHADOW, case=case, metric="prefill_tokens_per_s", unit="tokens/s")
    return rows


def calibration_text(integer: Path, text: Path | None, folder: Path) -> Path:
    """A file with the end of a text, or with words of a bundle's vocabulary."""
    part = folder / "calibration.txt"
    if text is not None:
        part.write_bytes(text.read_bytes()[-_CALIBRATION_BYTES:])
        return part
    with Bundle.open(integer) as bundle:
        words = prompt_ids(bundle.cfg.vocab_size, _CALIBRATION_WORDS)
        part.write_text(Tokenizer(bundle.tokenizer_files()).decode(words), encoding="utf-8")
    return part


def _alternated(
    systems: Sequence[System], bundle: Path, sizes: Sizes, lengths: Sequence[int], progress: Progress
) -> tuple[dict[tuple[str, int], Result], int]:
    """The results of prompts of these lengths, or half the context, and the longest."""
    with Bundle.open(bundle) as opened:
        vocab_size = opened.cfg.vocab_size
    fitting = sorted({min(each, sizes.context_tokens // 2) for each in lengths})
    results = alternate(
        systems,
        [prompt_ids(vocab_size, each) for each in fitting],
        decode_tokens=sizes.decode_tokens,
        rounds=sizes.rounds,
        patience_s=sizes.patience_s,
        progress=progress,
    )
    return results, fitting[-1]


def _opening(peer: str, model: Path, format_: str, sizes: Sizes) -> Opening:
    return Opening(
        peer=peer, model=model, format=format_, threads=sizes.threads, context_tokens=sizes.context_tokens
    )


@contextlib.contextmanager
def _opened(openings: Mapping[str, Opening], progress: Progress) -> Iterator[dict[str, Any]]:
    """Every system in a process of its own, by name."""
    with contextlib.ExitStack() as stack:
        yield {
            system: stack.enter_context(Child(system, opening, progress))
            for system, opening in openings.items()
        }
