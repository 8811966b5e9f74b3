"""Makes what is prepared: a model's folder, and GGUF files of the same weights; kept in the cache folder."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.models.byte_pairs import byte_pairs, texts_of, vocabulary_keys
from benchmarks.models.shapes import Shape, write_random
from benchmarks.peers.gguf_cache import content_key
from benchmarks.peers.gguf_file import PACKAGE_TYPES, quantize_gguf, refusal, write_gguf
from benchmarks.samples.stories import stories_file
from jaxllm.errors import ConfigError
from serving.host.progress import Progress
from serving.host.user_cache import cache_folder

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
