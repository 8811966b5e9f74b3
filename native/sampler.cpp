#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace jaxllm {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr size_t kMostBiases = 1024;
// Of lookups: lengths of what is looked up, and of pauses in tokens; steps before drafts are judged.
constexpr size_t kLongest = 5, kShortest = 2;
constexpr int kLongestPause = 512, kPatience = 6;
constexpr double kNewShare = 0.2;

struct Words {
  uint32_t high, low;
};

// Threefry-2x32 with 20 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011).
Words Threefry(Words key, Words block) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t words[] = {key.high, key.low, key.high ^ key.low ^ 0x1BD11BDAu};
  uint32_t high = block.high + words[0], low = block.low + words[1];
  for (uint32_t step = 0; step < 5; ++step) {
    for (int bits : kRotations[step % 2]) {
      high += low;
      low = high ^ (low << bits | low >> (32 - bits));
    }
    high += words[(step + 1) % 3];
    low += words[(step + 2) % 3] + step + 1;
  }
  return {high, low};
}

void InRange(const char* name, double value, double low, double high) {
  Require(value >= low && value <= high, JAXLLM_INVALID, std::string(name) + " is out of range");
}

}  // namespace

Sampler::Sampler(const jaxllm_sampling& options, const std::vector<int32_t>& prompt, int vocab)
    : options_(options), vocab_(static_cast<size_t>(vocab)) {
  InRange("temperature must be 0 to 100: it", options.temperature, 0, 100);
  InRange("top_k must not be negative: it", options.top_k, 0, std::numeric_limits<int32_t>::max());
  InRange("top_p must be above 0 and at most 1 (1 keeps all tokens): it", options.top_p,
          std::numeric_limits<float>::min(), 1);
  InRange("min_p must be 0 to 1: it", options.min_p, 0, 1);
  InRange("repetition_penalty must be 0.01 to 100 (1 changes nothing): it", options.repetition_penalty, 0.01,
          100);
  InRange("presence_penalty must be -100 to 100: it", options.presence_penalty, -100, 100);
  InRange("frequency_penalty must be -100 to 100: it", options.frequency_penalty, -100, 100);
  Require(
      options.bias_count <= kMostBiases && (!options.bias_count || (options.bias_tokens && options.biases)),
      JAXLLM_INVALID, "at most 1,024 biases are allowed, each with a token");
  penalizes_ = options.repetition_penalty != 1 || options.presence_penalty != 0 ||
               options.frequency_penalty != 0 || options.bias_count;
  if (!penalizes_) return;
  bias_.resize(vocab_);
  in_prompt_.resize(vocab_);
  counts_.resize(vocab_);
  for (size_t each = 0; each < options.bias_count; ++each) {
    int32_t token = options.bias_tokens[each];
    float value = options.biases[each];
    Require(
        token >= 0 && static_cast<size_t>(token) < vocab_ && (value == kNever || std::fabs(value) <= 1e6f),
        JAXLLM_INVALID, "a bias is of no token, or not -1e6 to 1e6 (or -INFINITY to forbid the token)");
    bias_[static_cast<size_t>(token)] += value;
  }
  for (int32_t each : prompt) in_prompt_[static_cast<size_t>(each)] = true;
}

void Sampler::Penalize(float* logits) const {
  for (size_t token = 0; token < vocab_; ++token) {
    float value = logits[token] + bias_[token];
    bool said = counts_[token] > 0;
    if (in_prompt_[token] || said)
      value = value > 0 ? value / options_.repetition_penalty : value * options_.repetition_penalty;
    value -= options_.frequency_penalty * static_cast<float>(counts_[token]);
    logits[token] = value - options_.presence_penalty * static_cast<float>(said);
  }
}

int32_t Sampler::Next(float* logits) {
  if (penalizes_) Penalize(logits);
  int32_t token = options_.temperature <= 0
                      ? static_cast<int32_t>(std::max_element(logits, logits + vocab_) - logits)
                      : Drawn(logits);
  Require(token >= 0 && std::isfinite(logits[token]), JAXLLM_RUNTIME,
          "the logits are not finite, or biases forbid every token; export the model again, or drop biases");
  ++drawn_;
  if (penalizes_) ++counts_[static_cast<size_t>(token)];
  return token;
}

int32_t Sampler::Drawn(float* logits) const {
  float largest = *std::max_element(logits, logits + vocab_);
  // Relative to the largest, so that division by a small temperature gives no positive infinity.
  std::vector<float> kept(vocab_);
  for (size_t token = 0; token < vocab_; ++token)
    kept[token] = (logits[token] - largest) / options_.temperature;
  auto drop_below = [&](float least) {
    for (float& each : kept)
      if (!(each >= least)) each = kNever;
  };
  auto top_k = static_cast<size_t>(options_.top_k);
  if (top_k > 0 && top_k < vocab_) {
    std::vector<float> sorted = kept;
    std::nth_element(sorted.begin(), sorted.begin() + static_cast<long>(top_k) - 1, sorted.end(),
                     std::greater<float>());
    drop_below(sorted[top_k - 1]);
  }
  if (options_.top_p < 1) {
    std::vector<float> left;
    for (float each : kept)
      if (each != kNever) left.push_back(each);
    std::sort(left.begin(), left.end(), std::greater<float>());
    double total = 0;
    for (float& each : left) total += std::exp(each);
    float reached = 0;
    size_t last = 0;
    for (; last < left.size(); ++last) {
      reached += std::exp(left[last]) / static_cast<float>(total);
      if (reached >= options_.top_p) break;
    }
    if (!left.empty()) drop_below(left[std::min(last, left.size() - 1)]);
  }
  if (options_.min_p > 0) drop_below(std::log(options_.min_p));
  Words seed = {static_cast<uint32_t>(options_.seed >> 32), static_cast<uint32_t>(options_.seed)};
  Words key = Threefry(seed, {0, drawn_});
  int32_t best = -1;
  float most = kNever;
  for (size_t token = 0; token < vocab_; ++token) {
    if (kept[token] == kNever) continue;
    Words words = Threefry(key, {0, static_cast<uint32_t>(token)});
    // The bits of a float in [1, 2).
    uint32_t bits = ((words.high ^ words.low) >> 9) | 0x3F800000u;
    float uniform;
    std::memcpy(&uniform, &bits, sizeof(uniform));
    uniform = std::max(uniform - 1, std::numeric_limits<float>::min());
    float value = kept[token] - std::log(-std::log(uniform));
    if (value > most) most = value, best = static_cast<int32_t>(token);
  }
  return best;
}

std::vector<int32_t> Lookup::Draft(const std::vector<int32_t>& text, size_t most) {
  if (left_ > 0 || !most) return {};
  for (size_t length = kLongest; length >= kShortest; --length) {
    if (text.size() <= length) continue;
    auto tail = text.end() - static_cast<long>(length);
    // The latest occurrence that ends before the text does.
    auto found = std::find_end(text.begin(), text.end() - 1, tail, text.end());
    if (found == text.end() - 1) continue;
    auto from = found + static_cast<long>(length);
    size_t behind = static_cast<size_t>(text.end() - from);
    return {from, from + static_cast<long>(std::min(most, behind))};
  }
  return {};
}

void Lookup::Learn(bool drafted, double spent_ms, size_t tokens) {
  double each = spent_ms / static_cast<double>(tokens);
  double& mean = drafted ? drafted_ms_ : plain_ms_;
  mean = mean ? mean + kNewShare * (each - mean) : each;
  if (!drafted) {
    left_ -= left_ > 0;
    return;
  }
  if (++tries_ < kPatience) return;
  if (!plain_ms_) {
    left_ = 1;  // A plain step, to compare with.
  } else if (drafted_ms_ > plain_ms_) {
    left_ = pause_;
    pause_ = std::min(2 * pause_, kLongestPause);
    tries_ = 0, drafted_ms_ = 0;
  } else {
    pause_ = 16;
  }
}

}  // namespace jaxllm
