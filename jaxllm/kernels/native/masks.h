// Masks of grammars that another process computes (serving/guided/worker.py), asked for while a step runs.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace jaxllm {

// Opens a channel: a socket to the process that follows an answer, of which this has a descriptor of its own,
// and the bits of tokens of plain text. 0 where it cannot be opened, or too many are.
uint64_t open_channel(int descriptor, std::vector<uint8_t> plain);
// Closes a channel when no kernel uses it any more; false where there is none.
bool close_channel(uint64_t handle);

// What came of a token.
enum class Reply : int32_t {
  kKept,     // it is plain text where most tokens are allowed, as hardly changes the mask: not asked yet
  kMask,     // the mask after it was read
  kWaiting,  // the answer is late, or has more than a mask: it stays in the socket
  kClosed,   // there is no such channel, or nobody reads it: nothing was sent
};
struct Tokens {
  const int32_t* first;
  size_t count;
  int32_t left;  // number of tokens that may follow before the first, -1 for any number
};
// Asks for the mask after tokens that were chosen under the same one, unless it may wait, and writes it to
// `mask` [vocab]: 0, or -inf for tokens that are not allowed.
Reply follow(uint64_t handle, const Tokens& tokens, float* mask, size_t vocab);

}  // namespace jaxllm
