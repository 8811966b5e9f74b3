"""Runs a `.tflite` model by LiteRT: XNNPACK on a CPU, with its packed weights stored in a file.

XNNPACK reads weights in its own order. Packed once, they are a file that later processes map: a start is a
matter of milliseconds, and the system can drop pages of weights. Caches are two sets of buffers; a step
reads one and writes the other.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError, ProgramError, one_line
from jaxllm.export.folder_format.adapters import ADAPTER
from jaxllm.export.folder_format.arrays import SOURCE_TOKENS, lengthened
from jaxllm.export.folder_format.codecs import CHUNK_TOKENS, CHUNKS, coded_shapes
from jaxllm.export.folder_format.controls import COUNT, NEXT_TOKENS, PENALIZED, PENALTIES, control_shapes
from jaxllm.export.folder_format.manifest import CODED_KINDS, MANIFEST, Manifest, Signature
from jaxllm.export.folder_format.tiny_lm import KEEP, MASK, MODEL, PROMPT
from jaxllm.export.programs.adapters import FolderAdapters
from jaxllm.export.programs.messages import runtime_messages_kept
from jaxllm.export.programs.packed import PackedFolder
from jaxllm.serving.host.machine import usable_cores
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.host.user_cache import buckets_bytes, cache_folder

_LOGITS = "logits"


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Caches of a level with `cache_tokens` positions, by name: those with the sequence, and those that the
    next step writes."""

    cache_tokens: int
    filled: dict[str, Any]
    spare: dict[str, Any]


class LiteRtExecutor:
    """Runs the signatures of one model (see `Executor`).

    Attributes:
      manifest: manifest of the model.
      threads: number of threads that compute.
      moves_rows: False, because Python can only read and write whole buffers, which is slower than what
        accepted tokens of other branches save.
      stops_early: False, because its programs have no loops.
    """

    moves_rows = stops_early = False

    def __init__(
        self, manifest: Manifest, folder: Path, *, threads: int = 0, packed: PackedFolder | None = None
    ) -> None:
        """Opens a model.

        Args:
          manifest: manifest of the folder.
          folder: folder of the model.
          threads: number of threads that compute; 0 for all cores of this process.
          packed: cache of packed weights; None for a folder in the user's cache directory, unless its limit
            is 0.

        Raises:
          ConfigError: LiteRT is not installed.
          ProgramError: the model is corrupt, or LiteRT rejects it.
        """
        if importlib.util.find_spec("ai_edge_litert") is None:
            raise ConfigError(
                "ai-edge-litert is not installed; run `pip install 'jaxllm[export]'`, in a virtual "
                "environment of its own, for packages of other extras may exclude it"
            )
        from ai_edge_litert.compiled_model import CompiledModel
        from ai_edge_litert.cpu_options import CpuOptions
        from ai_edge_litert.hardware_accelerator import HardwareAccelerator
        from ai_edge_litert.options import Options

        self.manifest, self.threads = manifest, threads or usable_cores()
        self.lock = threading.RLock()
        file, *others = {each.file for each in manifest.signatures}
        if others or manifest.cache_dtype != "float32":
            raise ProgramError(
                f"{folder} is not a single model over float32 caches, which LiteRT needs; export it again"
            )
        path = manifest.require_intact(folder, file)
        made_of = f"{manifest.files[file].xxh3_128} {importlib.metadata.version('ai-edge-litert')}"
        if packed is None and (limit := buckets_bytes()):
            packed = PackedFolder(cache_folder() / "xnnpack", limit_bytes=limit)
        opened = (
            contextlib.nullcontext() if packed is None else packed.opened(folder, manifest.precision, made_of)
        )
        self.adapters = FolderAdapters(manifest, folder)
        self._adapters: dict[tuple[str, int], Any] = {}
        self._buffers: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        with opened as kept, runtime_messages_kept() as said:
            cpu = CpuOptions(num_threads=self.threads, xnnpack_weight_cache_path=str(kept or ""))
            options = Options(hardware_accelerators=HardwareAccelerator.CPU, cpu_options=cpu)
            try:
                self._model = CompiledModel.from_file(str(path), options=options)
            except RuntimeError as error:
                raise ProgramError(
                    f"{path}: LiteRT refuses it ({one_line(error)}; {one_line(said())}); export it again"
                ) from error
            if missing := _missing(manifest, self._model):
                raise ProgramError(
                    f"{path} lacks the signatures {', '.join(missing)}, which {folder / MANIFEST} names; "
                    "copy both from one export"
                )
            # The first buffer makes the runtime search for accelerators again: do so now.
            self._inputs_and_outputs(manifest.signatures[0])[0]["tokens"].write(
                np.zeros((1, manifest.signatures[0].tokens), np.int32)
            )
        weakref.finalize(self, _close, self._model, self._buffers, self._adapters)

    def prepare(self, signatures: Sequence[Signature], progress: Progress | None = None) -> None:
        """See `Executor`; LiteRT has all signatures ready, only their buffers are made."""
        for done, signature in enumerate(signatures):
            self._inputs_and_outputs(signature)
            if progress is not None:
                progress("compile", done + 1, len(signatures))

    def is_ready(self, signature: Signature) -> bool:
        """See `Executor`; always True."""
        return True

    def start(self, level: int, cache_tokens: int) -> Buffers:
        """See `Executor`."""
        buffers = self._caches(level, cache_tokens)
        for name, shape in self.manifest.cache_shapes(level, cache_tokens).items():
            # Masked positions are multiplied by zero: they must be finite.
            buffers.filled[name].write(np.zeros(shape, np.float32))
        return buffers

    def grow(self, level: int, caches: Buffers, cache_tokens: int) -> Buffers:
        """See `Executor`."""
        longer = self._caches(level, cache_tokens)
        for name, shape in self.manifest.cache_shapes(level, cache_tokens).items():
            heads, width = shape[1], shape[3]
            whole = np.zeros(shape, np.float32)
            rows = caches.filled[name].read(caches.cache_tokens * heads * width, np.float32)
            whole[:, :, : caches.cache_tokens] = rows.reshape(1, heads, -1, width)
            longer.filled[name].write(whole)
        return longer

    def rows(self, level: int, caches: Buffers, tokens: int) -> dict[str, np.ndarray]:
        """See `Executor`."""
        found = {}
        for name, shape in self.manifest.cache_shapes(level, caches.cache_tokens).items():
            whole = caches.filled[name].read(math.prod(shape), np.float32).reshape(shape)
            found[name] = np.array(whole[:, :, :tokens])
        return found

    def restored(self, level: int, cache_tokens: int, rows: Mapping[str, np.ndarray]) -> Buffers:
        """See `Executor`."""
        buffers = self._caches(level, cache_tokens)
        for name, shape in self.manifest.cache_shapes(level, cache_tokens).items():
            buffers.filled[name].write(lengthened(rows[name], shape))
        return buffers

    def encode(self, signature: Signature, tokens: np.ndarray, count: int) -> dict[str, Any]:
        """See `Executor`."""
        inputs, outputs = self._inputs_and_outputs(signature)
        number = np.array([count], np.int32)
        inputs["tokens"].write(tokens)
        inputs[SOURCE_TOKENS].write(number)
        self._run(signature, inputs, outputs)
        level, taking, source = signature.level, self._decode(signature.level), {}
        for name, shape in self.manifest.source_shapes(level).items():
            source[name] = self._model.create_input_buffer_by_name(taking, name)
            if name == SOURCE_TOKENS:
                source[name].write(number)
                continue
            heads, width = shape[1], shape[3]
            rows = outputs[name].read(heads * signature.tokens * width, np.float32)
            source[name].write(lengthened(rows.reshape(1, heads, signature.tokens, width), shape))
        return source

    def _decode(self, level: int) -> str:
        """Name of a program that accepts a source of a level, as all but those that encode do."""
        return self.manifest.signature("decode", 1, level, self.manifest.context_tokens).name

    def run(
        self,
        signature: Signature,
        caches: Buffers,
        tokens: np.ndarray,
        input_pos: np.ndarray,
        mask: np.ndarray | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> tuple[np.ndarray | None, Buffers]:
        """See `Executor`."""
        inputs, outputs = self._inputs_and_outputs(signature)
        inputs["tokens"].write(tokens)
        inputs["input_pos"].write(input_pos)
        if mask is not None:
            inputs["mask"].write(mask)
        further = {**(source or {}), **self._adapter(signature.level)}
        self._run(signature, {**inputs, **caches.filled, **further}, {**outputs, **caches.spare})
        logits = None
        if _LOGITS in outputs:
            shape = (1, signature.tokens, self.manifest.levels[signature.level].cfg.vocab_size)
            logits = outputs[_LOGITS].read(int(np.prod(shape)), np.float32).reshape(shape)
        return logits, Buffers(caches.cache_tokens, caches.spare, caches.filled)

    def run_block(
        self,
        signature: Signature,
        caches: Buffers,
        token: int,
        at: int,
        controls: Mapping[str, np.ndarray],
        source: Mapping[str, Any] | None = None,
    ) -> tuple[np.ndarray, Buffers]:
        """See `Executor`."""
        inputs, outputs = self._inputs_and_outputs(signature)
        inputs["tokens"].write(np.array([[token]], np.int32))
        inputs["input_pos"].write(np.array([at], np.int32))
        # Without penalties the program reads none of their large arrays.
        skipped = () if controls["draw"][PENALIZED] else PENALTIES
        for name, each in controls.items():
            if name not in skipped:
                inputs[name].write(each)
        further = {**(source or {}), **self._adapter(signature.level)}
        self._run(signature, {**inputs, **caches.filled, **further}, {**outputs, **caches.spare})
        count = outputs[COUNT].read(1, np.int32)[0]
        tokens = outputs[NEXT_TOKENS].read(signature.tokens, np.int32)
        return np.array(tokens[:count]), Buffers(caches.cache_tokens, caches.spare, caches.filled)

    def run_tiny_lm(
        self, signature: Signature, tokens: np.ndarray, mask: np.ndarray
    ) -> dict[str, np.ndarray]:
        """See `Executor`."""
        inputs, outputs = self._inputs_and_outputs(signature)
        inputs["tokens"].write(tokens)
        inputs[MASK].write(mask)
        self._run(signature, inputs, outputs)
        facts = self.manifest.tiny_lm
        assert facts is not None
        sizes = {KEEP: signature.tokens, MODEL: len(facts.levels), PROMPT: len(facts.prompt_ratios)}
        return {name: np.array(outputs[name].read(size, np.float32))[None] for name, size in sizes.items()}

    def encode_chunks(
        self, signature: Signature, caches: Buffers, chunks: np.ndarray
    ) -> dict[str, np.ndarray]:
        """See `Executor`."""
        inputs, outputs = self._inputs_and_outputs(signature)
        inputs[CHUNKS].write(chunks)
        self._run(signature, {**inputs, **caches.filled}, outputs)
        found = {}
        for name, (shape, dtype) in self._coded(signature).items():
            found[name] = np.array(outputs[name].read(math.prod(shape), dtype.type)).reshape(shape)
        return found

    def load_chunks(
        self, signature: Signature, caches: Buffers, chunks: np.ndarray, coded: Mapping[str, np.ndarray]
    ) -> Buffers:
        """See `Executor`."""
        inputs, _ = self._inputs_and_outputs(signature)
        for name, each in {CHUNKS: chunks, **coded}.items():
            inputs[name].write(np.ascontiguousarray(each))
        self._run(signature, {**inputs, **caches.filled}, caches.spare)
        return Buffers(caches.cache_tokens, caches.spare, caches.filled)

    def _coded(self, signature: Signature) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        cfg = self.manifest.levels[signature.level].cfg
        return coded_shapes(cfg, signature.codec, signature.bits, signature.tokens // CHUNK_TOKENS)

    def _adapter(self, level: int) -> dict[str, Any]:
        """Buffer of the current adapter for a level's programs; empty if they accept none."""
        key = self.adapters.used, level
        if key not in self._adapters:
            array = self.adapters.array(level, self.adapters.used)
            if array is None:
                return {}
            self._adapters[key] = self._model.create_input_buffer_by_name(self._decode(level), ADAPTER)
            self._adapters[key].write(array)
        return {ADAPTER: self._adapters[key]}

    def keep(self, signature: Signature, caches: Buffers, at: int, path: np.ndarray) -> Buffers:
        """Refuses (see `moves_rows`)."""
        raise ConfigError(
            f"LiteRT moves no rows, {path.tolist()} of {signature.name}: give it lines of tokens"
        )

    def _run(self, signature: Signature, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        try:
            self._model.run_by_name(signature.name, inputs, outputs)
        except RuntimeError as error:
            raise ProgramError(f"LiteRT cannot run {signature.name} ({one_line(error)})") from error

    def _caches(self, level: int, cache_tokens: int) -> Buffers:
        """Uninitialized buffers for caches."""
        name = self.manifest.signature("decode", 1, level, cache_tokens).name
        shapes = self.manifest.cache_shapes(level, cache_tokens)
        filled = {each: self._model.create_input_buffer_by_name(name, each) for each in shapes}
        spare = {each: self._model.create_output_buffer_by_name(name, each) for each in shapes}
        return Buffers(cache_tokens, filled, spare)

    def _inputs_and_outputs(self, signature: Signature) -> tuple[dict[str, Any], dict[str, Any]]:
        """The buffers of a signature by name, without its caches."""
        name = signature.name
        if name not in self._buffers and signature.kind in CODED_KINDS:
            coded = list(self._coded(signature))
            takes, gives = ([], coded) if signature.kind == "encode_chunks" else (coded, [])
            self._buffers[name] = (
                {each: self._model.create_input_buffer_by_name(name, each) for each in (CHUNKS, *takes)},
                {each: self._model.create_output_buffer_by_name(name, each) for each in gives},
            )
        if name not in self._buffers:
            shapes = control_shapes(self.manifest.levels[signature.level].cfg.vocab_size)
            more = {"verify": ["mask"], "block": list(shapes)}.get(signature.kind, [])
            second = {"encode": SOURCE_TOKENS, "tiny_lm": MASK}.get(signature.kind, "input_pos")
            wanted = ["tokens", second, *more]
            inputs = {each: self._model.create_input_buffer_by_name(name, each) for each in wanted}
            read = [each for each in self.manifest.source_shapes(signature.level) if each != SOURCE_TOKENS]
            results = {
                "prefill": [], "block": [NEXT_TOKENS, COUNT], "encode": read, "tiny_lm": [KEEP, MODEL, PROMPT]
            }.get(signature.kind, [_LOGITS])  # fmt: skip
            outputs = {each: self._model.create_output_buffer_by_name(name, each) for each in results}
            if signature.kind == "block":
                for each, (shape, dtype) in shapes.items():
                    inputs[each].write(np.zeros(shape, dtype))
            self._buffers[name] = inputs, outputs
        return self._buffers[name]


def _missing(manifest: Manifest, model: Any) -> list[str]:
    """Returns the signatures of a manifest that a model lacks."""
    there = model.get_signature_list()
    return [each.name for each in manifest.signatures if each.name not in there]


def _close(model: Any, buffers: dict[str, Any], adapters: dict[Any, Any]) -> None:
    # The runtime's environment, which model and buffers own, prints a message at its end.
    with runtime_messages_kept():
        buffers.clear()
        adapters.clear()
        model.close()
        vars(model).clear()
