// Draws tokens as the Python loop does: the same penalties, filters and noise of a seed.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "failure.h"

namespace jaxllm {

class Sampler {
 public:
  Sampler(const jaxllm_sampling& options, const std::vector<int32_t>& prompt, int vocab);
  // The next token after logits of the vocabulary, which are changed; counts it.
  int32_t Next(float* logits);

 private:
  void Penalize(float* logits) const;
  int32_t Drawn(float* logits) const;

  jaxllm_sampling options_;
  size_t vocab_;
  std::vector<float> bias_;
  std::vector<bool> in_prompt_;
  std::vector<int32_t> counts_;
  uint32_t drawn_ = 0;
  bool penalizes_;
};

// Earlier continuations of a text's last tokens, as drafts, and whether drafts pay.
class Lookup {
 public:
  // At most `most` tokens that followed the latest earlier occurrence of the last ones; none while it pauses.
  std::vector<int32_t> Draft(const std::vector<int32_t>& text, size_t most);
  // Learns from a step's milliseconds and tokens; `drafted`: whether it verified drafts.
  void Learn(bool drafted, double spent_ms, size_t tokens);

 private:
  double plain_ms_ = 0, drafted_ms_ = 0;  // Per token, running means.
  int tries_ = 0, left_ = 0, pause_ = 16;
};

}  // namespace jaxllm
