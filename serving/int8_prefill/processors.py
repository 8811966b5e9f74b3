"""Runs the subgraphs of prompts on two processors: an integer one and a float one.

Each is a thread that runs one subgraph at a time on its own JAX device. The float processor is the CPU,
which runs everything but the integer subgraphs, including decoding. The integer processor is a GPU if
requested; else both are CPU devices with separate cores, which emulate a neural processor and a CPU: they
work in parallel, but neither is faster. (Not tested on a GPU yet: tests run integer subgraphs on a second
CPU device with the weights for a GPU.)

JAX creates devices and threads once: call `prepare_processors` before JAX is used.
"""

import contextlib
from collections.abc import Iterator, Sequence

import jax

from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.schedule import Processor
from jaxllm.kernels import native
from jaxllm.serving.ground.int8_prefill_options import IntegerDevice
from jaxllm.serving.host.machine import Device
from jaxllm.serving.int8_prefill.processor_pair import ProcessorPair, halved_cores


def _require_prepared() -> None:
    if len(jax.devices("cpu")) < 2 or jax.config.read("jax_cpu_enable_async_dispatch"):
        raise ConfigError(
            "two processors must be prepared before JAX is used: call "
            "jaxllm.serving.int8_prefill.processors.prepare_processors() first, in a process of its own"
        )


def prepare_processors(integer: IntegerDevice = "cpu") -> None:
    """Makes JAX create two CPU devices that compute in the calling thread, with the CPU as its default; must
    be called before JAX is used.

    Raises:
      ConfigError: JAX is already in use without two such devices; or it has no GPU.
    """
    try:
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        # The first platform is the default.
        jax.config.update("jax_platforms", "cpu" if integer == "cpu" else "cpu,cuda")
    except RuntimeError:
        _require_prepared()
    if integer == "gpu":
        require_gpu()


def require_gpu() -> Device:
    """The first GPU of JAX.

    Raises:
      ConfigError: JAX has no GPU.
    """
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        raise ConfigError(
            "the integer processor was to be a GPU, and JAX has none here; install JAX for your GPU "
            "(`pip install 'jaxllm[cuda]'`), or let it be a core of the CPU (--integer-device cpu)"
        ) from error


class TwoProcessors(ProcessorPair):
    """An integer and a float processor.

    Attributes:
      trace: trace of the last prompt; None before the first.
      both_are_cpus: whether both run on cores of the CPU, without an accelerator.
    """

    def __init__(self, integer: IntegerDevice = "cpu") -> None:
        """Starts both threads, with an integer processor of this kind; `close` stops them.

        Raises:
          ConfigError: there are no two devices (see `prepare_processors`), no two cores, or no GPU.
        """
        cpus = jax.devices("cpu")
        cores: dict[Processor, Sequence[int]] = {"integer": (), "float": ()}
        self.both_are_cpus = integer == "cpu"
        if self.both_are_cpus:
            _require_prepared()
            # One core each.
            cores = {name: own[:1] for name, own in halved_cores().items()}
            self._devices: dict[Processor, Device] = {"integer": cpus[1], "float": cpus[0]}
        else:
            self._devices = {"integer": require_gpu(), "float": cpus[0]}
            if jax.devices()[0].platform != "cpu":
                raise ConfigError(
                    "next to a GPU the CPU runs everything else: call jaxllm.serving.int8_prefill.processors."
                    "prepare_processors('gpu') before JAX is used"
                )
        super().__init__(cores, self._own_threads)

    def device(self, processor: Processor) -> Device:
        """The device of a processor's buckets and weights."""
        return self._devices[processor]

    @contextlib.contextmanager
    def _own_threads(self) -> Iterator[None]:
        """Within this context kernels only use the calling thread if both processors are CPUs: all kernels
        of a process share one thread pool, and the processors would wait for each other."""
        if not self.both_are_cpus:
            yield
            return
        before = native.threads()
        native.set_threads(1)
        try:
            yield
        finally:
            native.set_threads(before)
