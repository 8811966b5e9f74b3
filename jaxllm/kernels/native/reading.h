// How the weights of one row's products are read: in which runs, and what is read after them.
//
// A product of one row takes as long as its weights take to arrive. Memory delivers long runs faster than
// short ones, and idles whenever threads wait for each other; so each thread reads long runs first, and
// one that has nothing to do asks for what it will read next.
#pragma once
#include <stddef.h>

#include <algorithm>

namespace jaxllm {

// What threads will read: `runs` of `bytes`, `stride` apart, of one array or of two alike. Thread i of n
// takes runs i, i + n, i + 2n ...
struct Upcoming {
  const void *data = nullptr, *other = nullptr;
  size_t runs = 0, stride = 0, bytes = 0;
};

// Panels cut into ranges for tasks: long ones first, then ever shorter ones, so that threads end together.
class Ranges {
 public:
  struct Range {
    size_t from, to;
  };

  // `bytes`: what one panel reads.
  Ranges(size_t panels, size_t bytes, size_t threads)
      : panels_(panels), threads_(threads), least_(kLeastBytes / std::max<size_t>(1, bytes) + 1) {}

  // Panels of the first range, the longest.
  size_t longest() const { return length(0); }

  size_t count() const {
    size_t tasks = 0;
    for (size_t from = 0; from < panels_; from += ranges(from) * length(from)) tasks += ranges(from);
    return tasks;
  }

  Range at(size_t task) const {
    size_t from = 0;
    for (; task >= ranges(from); from += ranges(from) * length(from)) task -= ranges(from);
    const size_t begin = from + task * length(from);
    return {begin, std::min(panels_, begin + length(from))};
  }

 private:
  static constexpr size_t kLeastBytes = 16384;

  // A round gives each thread one range; together they are about half of what is left.
  size_t length(size_t from) const {
    return std::max(least_, (panels_ - from + 2 * threads_ - 1) / (2 * threads_));
  }
  size_t ranges(size_t from) const {
    return std::min(threads_, (panels_ - from + length(from) - 1) / length(from));
  }

  size_t panels_, threads_, least_;
};

// Says that an operation whose threads read `now` begins, and returns what was read after it the last time:
// a model runs the same operations in the same order for every token. Pointers are never followed.
Upcoming begin_reading(const Upcoming& now);
}  // namespace jaxllm
