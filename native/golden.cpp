#include <dlfcn.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>

#include "device.h"

namespace jaxllm {
namespace {

// Another token is a tie, which rounding decides, if its log-probability is so near to that of the best.
constexpr float kTieNats = 0.2F;

// Tells one build of the runtime from another: it may compute otherwise after an update.
std::string Runtime() {
  Dl_info found;
  struct stat facts;
  if (!dladdr(reinterpret_cast<void*>(&LiteRtCreateEnvironment), &found) || stat(found.dli_fname, &facts))
    return "unknown";
  return std::to_string(facts.st_size) + " " + std::to_string(facts.st_mtime);
}

void RequireSame(Programs& programs, const GoldenAnswer& golden, int vocab) {
  for (const auto* tokens : {&golden.prompt, &golden.tokens})
    for (int32_t each : *tokens)
      Require(each < vocab, JAXLLM_DAMAGED, "a golden answer is of no vocabulary; export the model again");
  size_t positions = golden.prompt.size() + golden.tokens.size();
  std::vector<int> rooms = programs.Rooms(golden.level);
  auto fits = std::lower_bound(rooms.begin(), rooms.end(), static_cast<int>(positions));
  Require(fits != rooms.end(), JAXLLM_DAMAGED, "no programs give a golden answer; export the model again");
  int room = *fits;
  Caches caches = programs.Made(golden.level, room);
  int at = 0, left = static_cast<int>(golden.prompt.size()) - 1;
  for (int each : PlannedChunks(left, programs.Sizes("prefill", golden.level, room))) {
    int count = std::min(each, left);
    programs.Run("prefill", each, caches, golden.prompt.data() + at, count, at, nullptr);
    at += count;
    left -= count;
  }
  int32_t token = golden.prompt.back();
  std::vector<float> logits;
  for (size_t place = 0; place < golden.tokens.size(); ++place) {
    programs.Run("decode", 1, caches, &token, 1, at++, &logits);
    auto best = std::max_element(logits.begin(), logits.end());
    token = golden.tokens[place];
    auto found = static_cast<int32_t>(best - logits.begin());
    bool finite = std::all_of(logits.begin(), logits.end(), [](float each) { return std::isfinite(each); });
    float behind = *best - logits[static_cast<size_t>(token)];
    Require(finite && (found == token || behind <= kTieNats), JAXLLM_RUNTIME,
            "level " + std::to_string(golden.level) +
                " answers otherwise than where the programs were made: its token " +
                std::to_string(place + 1) + " is " + std::to_string(found) + ", not " +
                std::to_string(token) + "; use another version of the runtime, or export the model again");
    // Behind a tie answers may differ.
    if (found != token) return;
  }
}

}  // namespace

void RequireGolden(Programs& programs, const Manifest& manifest, const char* path) {
  std::string facts = manifest.model_checksum;
  for (const GoldenAnswer& each : manifest.golden)
    for (const auto* tokens : {&each.prompt, &each.tokens})
      for (int32_t token : *tokens) facts += " " + std::to_string(token);
  std::string head = "jaxllm-device-golden 1 " + ChecksumOf(facts) + " " +
                     std::to_string(programs.threads()) + " " + Processor() + " " + Runtime() + "\n";
  if (path) {
    std::ifstream file(path, std::ios::binary);
    std::string text(head.size() + 1, '\0');
    file.read(text.data(), static_cast<long>(text.size()));
    text.resize(static_cast<size_t>(file.gcount()));
    if (text == head) return;
  }
  for (const GoldenAnswer& each : manifest.golden)
    RequireSame(programs, each, manifest.vocab_sizes.at(each.level));
  if (path) WriteFile(path, head);
}

}  // namespace jaxllm
