"""Asks the process that follows an answer through its grammar for masks, from compiled steps."""

import jax
import jax.numpy as jnp

from jaxllm.kernels.native import OpenTable, native_library, target

# What came of tokens (kernels/native/masks.h): not asked about yet; the mask after them; it comes later, or
# with more to read on the host; they could not be sent.
KEPT, MASK, WAITING, CLOSED = range(4)


class MaskChannel(OpenTable):
    """Open channel of the native library to the process that follows an answer through its grammar."""

    def __init__(self, descriptor: int, plain: bytes) -> None:
        """Opens a channel.

        Args:
          descriptor: socket; the channel has a descriptor of its own.
          plain: bits of the tokens after which a mask that allows most tokens is likely to stay.

        Raises:
          ValueError: the process has no descriptor left, or 4,096 channels are open.
        """
        target("follow")
        library = native_library()
        super().__init__(library.open_channel(descriptor, plain), library.close_channel)


def follow(
    channel: jax.Array, tokens: jax.Array, mask: jax.Array, ints: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Asks the process that follows an answer through its grammar for the mask after tokens that were sampled
    under the same one; not yet if the last is plain text, and most tokens were allowed.

    Args:
      channel: `[2]` uint32, the handle of a `MaskChannel`.
      tokens: `[1, N]` int32.
      mask: `[V]` float32, the last mask: 0, or -inf for tokens that are not allowed.
      ints: `[4]` int32: whether to ask at all; index of the first token that was not asked about, and that
        after the last; and the number of tokens that may follow before the first, -1 for any number.

    Returns:
      The next mask `[V]`, or the same; and int32, one of the replies above.
    """
    results = jax.ShapeDtypeStruct(mask.shape, jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
    call = jax.ffi.ffi_call(target("follow"), results, has_side_effect=True, input_output_aliases={2: 0})
    mask, reply = call(channel, tokens, mask, ints)
    return mask, reply[0]
