// Mixtures of experts: who is visited, the visits, and their sum. Whatever the number of rows, each row is to
// the bit what it is alone.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>

#include "ops.h"
#include "pool.h"

namespace jaxllm {
namespace {

// A multiple of the sums that kernels make at a time, so that these are the same ones always.
constexpr size_t kExpertsPerTask = 32;

// The `choices` largest of `count` probabilities, largest first, of equal ones the first.
void take_largest(const float* probabilities, size_t count, size_t choices, float* weights, int32_t* ids) {
  for (size_t k = 0; k < choices; k++) {
    size_t best = count;
    for (size_t e = 0; e < count; e++) {
      const bool taken = std::find(ids, ids + k, static_cast<int32_t>(e)) != ids + k;
      if (!taken && (best == count || probabilities[e] > probabilities[best])) best = e;
    }
    ids[k] = static_cast<int32_t>(best);
    weights[k] = probabilities[best];
  }
}

void choose(const float* logits, size_t experts, size_t choices, bool normalized, float* probabilities,
            float* weights, int32_t* ids) {
  const float top = *std::max_element(logits, logits + experts);
  float sum = 0;
  for (size_t e = 0; e < experts; e++) sum += probabilities[e] = expf(logits[e] - top);
  for (size_t e = 0; e < experts; e++) probabilities[e] /= sum;
  take_largest(probabilities, experts, choices, weights, ids);
  if (!normalized) return;
  float chosen = 0;
  for (size_t k = 0; k < choices; k++) chosen += weights[k];
  for (size_t k = 0; k < choices; k++) weights[k] /= chosen;
}

}  // namespace

Failure route(const float* x, size_t rows, size_t width, Norm norm, const float* router, const float* bias,
              size_t experts, size_t choices, bool normalized, float* logits, float* weights, int32_t* ids) {
  const Backend& kernels = backend();
  const float* inputs = x;
  if (norm.scale) {
    float* normed = static_cast<float*>(thread_scratch(kActivations, rows * width * sizeof(float)));
    if (!normed) return kNoMemory;
    for (size_t row = 0; row < rows; row++)
      kernels.rms_norm(x + row * width, norm.scale, norm.eps, width, normed + row * width);
    inputs = normed;
  }
  const size_t parts = (experts + kExpertsPerTask - 1) / kExpertsPerTask;
  parallel(rows * parts, [&](size_t task) {
    // Rows are the faster index: the tasks underway share a part of the router.
    const size_t row = task % rows, from = task / rows * kExpertsPerTask;
    const size_t count = std::min(experts - from, kExpertsPerTask);
    kernels.low_sums(inputs + row * width, router + from * width, width, count, width,
                     logits + row * experts + from);
  });
  float* probabilities = static_cast<float*>(thread_scratch(kTaskOut, experts * sizeof(float)));
  if (!probabilities) return kNoMemory;
  for (size_t row = 0; row < rows; row++) {
    for (size_t expert = 0; bias && expert < experts; expert++)
      logits[row * experts + expert] += bias[expert];
    choose(logits + row * experts, experts, choices, normalized, probabilities, weights + row * choices,
           ids + row * choices);
  }
  return nullptr;
}

Failure visit_experts(const float* x, size_t width, Norm norm, const Tile* tiles, size_t count,
                      const Block* experts, size_t units, int activation, float* y) {
  for (size_t i = 0; i < count; i++) {
    const Tile& tile = tiles[i];
    float* rows = static_cast<float*>(thread_scratch(kGathered, tile.rows * width * sizeof(float)));
    if (!rows) return kNoMemory;
    for (size_t row = 0; row < tile.rows; row++)
      memcpy(rows + row * width, x + static_cast<size_t>(tile.tokens[row]) * width, width * sizeof(float));
    const Block& expert = experts[tile.expert];
    Steps steps{};
    // What is begun with the high planes of gate and up is finished without them.
    steps.in.plain = expert.up.stored.nested;
    const Failure failure = feed_forward(rows, tile.rows, width, norm, steps, expert, units, activation,
                                         false, y + tile.start * width);
    if (failure) return failure;
  }
  return nullptr;
}

void sum_visits(const float* visits, size_t width, const int32_t* places, const float* weights, size_t rows,
                size_t choices, const float* residual, float* y) {
  constexpr size_t kRowsPerTask = 16;
  const Backend& kernels = backend();
  parallel((rows + kRowsPerTask - 1) / kRowsPerTask, [&](size_t task) {
    for (size_t row = task * kRowsPerTask; row < std::min(rows, (task + 1) * kRowsPerTask); row++) {
      float* to = y + row * width;
      if (residual) {
        memcpy(to, residual + row * width, width * sizeof(float));
      } else {
        memset(to, 0, width * sizeof(float));
      }
      for (size_t k = 0; k < choices; k++) {
        const float* visit = visits + static_cast<size_t>(places[row * choices + k]) * width;
        kernels.add_low(weights + row * choices + k, 1, 1, visit, width, 1, width, to, width);
      }
    }
  });
}

}  // namespace jaxllm
