#include "masks.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>
#include <vector>

#include "slots.h"

namespace jaxllm {
namespace {

// An answer that is later than this stays in the socket, so that other answers of the device go on. The rest
// of one that has begun comes at once, or its process has ended.
constexpr int kSoonMs = 10, kRestMs = 1000;
#ifdef MSG_NOSIGNAL
constexpr int kSend = MSG_NOSIGNAL | MSG_DONTWAIT;
#else
constexpr int kSend = MSG_DONTWAIT;
#endif

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  int number() const { return number_; }

 private:
  int number_ = -1;
};

struct Channel {
  Descriptor socket;
  std::vector<uint8_t> plain;

  bool is_plain(int32_t token) const {
    const size_t at = static_cast<size_t>(token);
    return token >= 0 && at / 8 < plain.size() && (plain[at / 8] >> at % 8 & 1);
  }
};
Slots<Channel, 4096> channels;

// A message is its length, 8 bytes, most significant first, and as many bytes. An answer has a byte that says
// whether all went well, the head below, and a mask of bits.
constexpr size_t kLength = 8, kHead = 13;

uint64_t big_endian(const uint8_t* bytes, size_t count) {
  uint64_t value = 0;
  for (size_t i = 0; i < count; i++) value = value << 8 | bytes[i];
  return value;
}

// Whether there is something to read within the time.
bool readable(int socket, int ms) {
  pollfd asked = {socket, POLLIN, 0};
  int found;
  do found = poll(&asked, 1, ms);
  while (found < 0 && errno == EINTR);
  return found > 0 && (asked.revents & POLLIN);
}

bool read_exactly(int socket, uint8_t* out, size_t count) {
  while (count) {
    const ssize_t got = recv(socket, out, count, MSG_DONTWAIT);
    if (got > 0) {
      out += got, count -= static_cast<size_t>(got);
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR) || !readable(socket, kRestMs)) {
      return false;
    }
  }
  return true;
}

// The masks of eight tokens by their bits.
struct Expanded {
  float of[256][8];
  Expanded() {
    for (int bits = 0; bits < 256; bits++) {
      for (int i = 0; i < 8; i++)
        of[bits][i] = bits >> i & 1 ? 0.0f : -std::numeric_limits<float>::infinity();
    }
  }
};

bool most_allowed(const float* mask, size_t vocab) {
  size_t allowed = 0;
  for (size_t i = 0; i < vocab; i++) allowed += mask[i] == 0;
  return 2 * allowed > vocab;
}

bool send_tokens(int socket, const Tokens& tokens) {
  std::vector<uint32_t> message = {static_cast<uint32_t>(tokens.left)};
  message.insert(message.end(), tokens.first, tokens.first + tokens.count);
  const size_t size = message.size() * sizeof(uint32_t);
  std::vector<uint8_t> all(kLength + size);
  for (size_t i = 0; i < kLength; i++) all[i] = static_cast<uint8_t>(size >> 8 * (kLength - 1 - i));
  memcpy(all.data() + kLength, message.data(), size);
  // So few bytes are sent all or not at all.
  return send(socket, all.data(), all.size(), kSend) == static_cast<ssize_t>(all.size());
}

Reply receive(int socket, size_t sent, float* mask, size_t vocab) {
  uint8_t head[kLength + kHead];
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kSoonMs);
  do {
    if (!readable(socket, kSoonMs)) return Reply::kWaiting;
    const ssize_t there = recv(socket, head, sizeof(head), MSG_PEEK | MSG_DONTWAIT);
    if (there == static_cast<ssize_t>(sizeof(head))) break;
    // A fault's message may be shorter.
    if (there == 0 || std::chrono::steady_clock::now() > until) return Reply::kWaiting;
  } while (true);
  const uint8_t* const answer = head + kLength;
  const uint64_t taken = big_endian(answer + 1, 4), forced = big_endian(answer + 9, 4);
  const bool completes = answer[6], goes_on = answer[8];
  const uint64_t bytes = big_endian(head, kLength);
  if (answer[0] != 1 || taken != sent || completes || !goes_on || forced || bytes < kHead + (vocab + 7) / 8 ||
      bytes > kHead + vocab)
    return Reply::kWaiting;
  std::vector<uint8_t> all(kLength + static_cast<size_t>(bytes));
  if (!read_exactly(socket, all.data(), all.size())) {
    // What is left of it would be read as another answer.
    shutdown(socket, SHUT_RDWR);
    return Reply::kWaiting;
  }
  const uint8_t* const bits = all.data() + kLength + kHead;
  static const Expanded expanded;
  for (size_t i = 0; i < vocab; i += 8)
    memcpy(mask + i, expanded.of[bits[i / 8]], sizeof(float) * std::min<size_t>(8, vocab - i));
  return Reply::kMask;
}

}  // namespace

uint64_t open_channel(int descriptor, std::vector<uint8_t> plain) {
  Descriptor own(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
  return own.number() < 0 ? 0 : channels.open({std::move(own), std::move(plain)});
}

bool close_channel(uint64_t handle) { return channels.close(handle); }

Reply follow(uint64_t handle, const Tokens& tokens, float* mask, size_t vocab) {
  struct Leave {
    size_t slot = SIZE_MAX;
    ~Leave() { channels.leave(slot); }
  } reader;
  const Channel* const channel = channels.enter(handle, reader.slot);
  if (!channel || !tokens.count) return Reply::kClosed;
  if (channel->is_plain(tokens.first[tokens.count - 1]) && most_allowed(mask, vocab)) return Reply::kKept;
  const int socket = channel->socket.number();
  return send_tokens(socket, tokens) ? receive(socket, tokens.count, mask, vocab) : Reply::kClosed;
}

}  // namespace jaxllm
