"""Reads and writes the rows of a context that stand in place of tokens, such as those of its images: one
segment of one chunk, whose first layer has places and whose second has rows.

Rows are never made of tokens: what a context lost of its chunks is computed from them. They are kept as they
were given, in float32, beside the chunks, and count as these do for quotas.
"""

from pathlib import Path

import numpy as np

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.kv.codecs import RAW
from serving.contexts.encryption import Vault
from serving.contexts.record import Record
from serving.contexts.segment import Chunks, Segment, write_segment
from serving.host.direct_io import Storage
from serving.prompt_rows import PromptRows

_PLACE, _ROW = np.dtype("<i8"), np.dtype("<f4")


def row_chunks(rows: PromptRows) -> Chunks:
    """Rows as the one chunk of a segment."""
    places, wide = rows.at.astype(_PLACE), np.ascontiguousarray(rows.rows, _ROW)
    return {0: (RAW, [each.reshape(-1).view(np.uint8) for each in (places, wide)])}


def write_rows(
    path: Path, rows: PromptRows, storage: Storage, vault: Vault | None, *, flush: bool = True
) -> str:
    """Writes the rows of a context, whole or not at all; returns the checksum of the file's index.

    Raises:
      OSError: they cannot be written.
    """
    return write_segment(path, row_chunks(rows), ["rows"], storage, flush=flush, vault=vault)


def read_rows(
    folder: Path, record: Record, storage: Storage, vault: Vault | None = None
) -> PromptRows | None:
    """The rows of a context, of those tokens that it has; None where it has none.

    Raises:
      CheckpointError: they are damaged, and with them the context.
      Unreadable: storage refuses.
    """
    if not record.rows:
        return None
    path = folder / record.rows
    with Segment(path, storage, vault) as segment:
        known = [(each.chunk, each.bits) for each in segment.chunks] == [(0, RAW)]
        if segment.checksum != record.checksums.get(record.rows) or segment.layers != 2 or not known:
            raise _damaged(path)
        places, wide = (segment.read(layer, [0])[0] for layer in range(2))
    count = places.size // _PLACE.itemsize
    if not count or places.size % _PLACE.itemsize or wide.size % (count * _ROW.itemsize):
        raise _damaged(path)
    try:
        rows = PromptRows(places.copy().view(_PLACE), wide.copy().view(_ROW).reshape(count, -1))
    except ConfigError as error:
        raise _damaged(path) from error
    return rows.before(len(record.tokens))


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: the rows of the context's images are not what was written; make a new context"
    )
