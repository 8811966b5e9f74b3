"""Encodes chunks of a cache by the codec programs of a folder, and loads them."""

from collections.abc import Sequence

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.export.folder_format.codecs import CHUNK_TOKENS, blobs_of, coded_of, coded_shapes
from jaxllm.export.folder_format.manifest import Kind, Signature
from jaxllm.export.programs.runner import ProgramCache, ProgramRunner

Blobs = tuple[np.ndarray, ...]


def require_codec_programs(runner: ProgramRunner, bits: int) -> str:
    """Returns the codec of a folder's programs.

    Raises:
      ConfigError: there are none at `bits` bits.
    """
    manifest = runner.executor.manifest
    for room in manifest.cache_tokens(runner.level):
        for kind in ("encode_chunks", "load_chunks"):
            if manifest.coding(kind, bits, runner.level, room) is None:
                raise ConfigError(
                    f"{manifest.name} has no programs of contexts at {bits} bits over {room} tokens; "
                    "export the model with --codec, or keep contexts raw"
                )
    return manifest.codec


def encoded(runner: ProgramRunner, cache: ProgramCache, chunks: Sequence[int], bits: int) -> dict[int, Blobs]:
    """Blobs of each layer of some chunks of a cache, by their numbers."""
    signature, found = _program(runner, "encode_chunks", bits, cache), {}
    for part in _parts(chunks, signature):
        coded = runner.executor.encode_chunks(signature, cache.caches, _numbers(part, signature))
        found |= zip(part, blobs_of(coded, runner.cfg.layers, len(part)), strict=True)
    return found


def loaded(
    runner: ProgramRunner, cache: ProgramCache, chunks: Sequence[tuple[int, int, Sequence[np.ndarray]]]
) -> ProgramCache:
    """A cache with chunks in their places: number, bits and blobs of each."""
    caches = cache.caches
    for bits in dict.fromkeys(bits for _, bits, _ in chunks):
        signature = _program(runner, "load_chunks", bits, cache)
        own = {number: blobs for number, width, blobs in chunks if width == bits}
        shapes = coded_shapes(runner.cfg, signature.codec, bits, signature.tokens // CHUNK_TOKENS)
        for part in _parts(list(own), signature):
            coded = coded_of([own[number] for number in part], shapes, runner.cfg.layers)
            caches = runner.executor.load_chunks(signature, caches, _numbers(part, signature), coded)
    return cache.after(caches, cache.length)


def _program(runner: ProgramRunner, kind: Kind, bits: int, cache: ProgramCache) -> Signature:
    found = runner.executor.manifest.coding(kind, bits, runner.level, cache.capacity_tokens)
    if found is None:
        raise ConfigError(f"there is no program that codes {bits} bits; export the model with --codec")
    return found


def _parts(chunks: Sequence[int], signature: Signature) -> list[list[int]]:
    most = signature.tokens // CHUNK_TOKENS
    return [list(chunks[at : at + most]) for at in range(0, len(chunks), most)]


def _numbers(part: Sequence[int], signature: Signature) -> np.ndarray:
    """Numbers of chunks, the last repeated up to as many as the program requires."""
    missing = signature.tokens // CHUNK_TOKENS - len(part)
    return np.array([*part, *[part[-1]] * missing], np.int32)
