"""Compiles buckets in another process, which stores them on disk: a compiler leaves some hundred megabytes of
the process that it ran in, and holds its interpreter's lock for seconds.

The other process has this one's modules, environment and settings of JAX, or refuses. It ends with this one.
"""

import concurrent.futures
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxllm.serving.buckets.bucket import Bucket

_BOOT = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); "
    "from jaxllm.serving.host.jax_import import import_jax; import_jax(); "
    "from jaxllm.serving.buckets import bucket_table, compiler; "
    "compiler.serve(bucket_table.CompiledBucketFolder, bucket_table.environment_facts())"
)
_DONE = b"."
# A bucket, the argument of its `lower`, and its key on disk.
Work = tuple[Bucket, Any, str]


def compile_apart(
    works: Sequence[Work], folder: Any, environment: dict[str, Any], on_done: Callable[[int], None]
) -> str:
    """Compiles buckets in another process and waits until they are stored.

    Args:
      works: buckets, each with its argument and key.
      folder: the `CompiledBucketFolder` that they are stored in.
      environment: `environment_facts` of this process.
      on_done: called with the number of finished buckets, after each.

    Returns:
      Why some of them were not compiled; empty if all were.
    """
    if not sys.executable:
        return "this program has no Python to start another process with"
    from jaxllm.kernels import native

    facts = environment, repr(native.kernels())
    try:
        request = pickle.dumps((*facts, works, str(folder.folder), folder.limit_bytes))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        # Such as a config of somebody's own architecture.
        return f"their description cannot be passed on ({error!s:.200})"
    path = [os.path.abspath(each) for each in sys.path if os.path.exists(each or ".")]
    child = subprocess.Popen(
        [sys.executable, "-c", _BOOT, json.dumps(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Outside of the terminal's process group: an interrupt goes to this process, which ends the other.
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        done, lines = 0, list[bytes]()
        errors = child.stderr
        reader = threading.Thread(target=lambda: lines.extend(errors), daemon=True)
        reader.start()
        try:
            child.stdin.write(request)
            child.stdin.flush()
        except OSError:
            pass  # It has ended; its code says so.
        while child.stdout.read(1) == _DONE:
            done += 1
            on_done(done)
        code = child.wait()
        reader.join(1.0)
    finally:
        # After an interrupt, too.
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            pipe.close()
    if code == 0 and done == len(works):
        return ""
    said = lines[-1].decode(errors="replace").strip() if lines else f"exit {code}"
    return f"{done} of {len(works)} were: {said:.200}"


def serve(make_folder: Callable[..., Any], own: dict[str, Any]) -> None:
    """The other process: compiles the buckets of the request on its input, and writes a byte after each.

    Args:
      make_folder: `CompiledBucketFolder`.
      own: `environment_facts` of this process.
    """
    environment, kernels, works, folder, limit_bytes = pickle.load(sys.stdin.buffer)

    def watch() -> None:
        # The input ends with the process that asked; compiling cannot be interrupted. Read without its
        # buffer, whose lock this thread would hold at the end.
        os.read(sys.stdin.fileno(), 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    from jaxllm.kernels import native
    from jaxllm.serving.host.machine import usable_cores

    if own != environment or repr(native.kernels()) != kernels:
        sys.exit("JAX is set up differently in another process (jax.config.update, or kernels of one's own)")
    store = make_folder(Path(folder), limit_bytes=limit_bytes)
    out = os.dup(sys.stdout.fileno())
    # What libraries print is no answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def compiled(work: Work) -> None:
        bucket, model, key = work
        store.store(key, bucket.compile(model))
        os.write(out, _DONE)

    with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
        for _ in pool.map(compiled, works):
            pass
    sys.stdout.flush()
    # Not through the finalizers of JAX, for which nobody waits.
    os._exit(0)
