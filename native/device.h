// An open folder, its conversations, and what they keep in files.

#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "programs.h"
#include "sampler.h"

namespace jaxllm {

// Times of a device's levels: milliseconds of every program over the shortest caches, by level and tokens.
using Times = std::map<std::pair<int, int>, double>;

// Times of a file that is of these programs on this device, or measured ones, kept there unless `path` is
// null.
Times ProfiledTimes(Programs& programs, const Manifest& manifest, const char* path);

// What this processor is, as far as a process may see.
std::string Processor();

// Compares the manifest's golden answers, unless the file says that this device gave them; then writes it.
void RequireGolden(Programs& programs, const Manifest& manifest, const char* path);

double FirstTokenMs(const Times& times, int level, size_t prompt_tokens, size_t reused_tokens);
double TokenMs(const Times& times, int level);

// Writes all bytes to a descriptor; and to a file that gets its name when it is whole.
void WriteAll(int descriptor, const std::string& bytes);
void WriteFile(const std::string& path, const std::string& bytes);

// The checksum of bytes of any number.
std::string ChecksumOf(std::string bytes);

}  // namespace jaxllm

struct jaxllm_device {
  template <typename... Arguments>
  explicit jaxllm_device(int threads, Arguments... arguments)
      : folder(arguments...), programs(folder, threads) {
    for (int each : programs.Levels()) levels.push_back(each);
  }

  jaxllm_plan Plan(const jaxllm_objective& objective, size_t prompt_tokens,
                   const std::map<int, size_t>& reused = {}) const;
  int vocab(int level) const { return folder.manifest.vocab_sizes.at(level); }

  jaxllm::Folder folder;
  mutable jaxllm::Programs programs;
  std::vector<int32_t> levels;
  mutable std::mutex timing;  // Guards `times`.
  jaxllm::Times times;
};

struct jaxllm_conversation {
  explicit jaxllm_conversation(jaxllm_device& of) : device(of) {}

  void Answer(const jaxllm_request& request, jaxllm_result* result);
  // The bytes of a file; and reads them, and returns whether tokens are computed again.
  std::string Stored() const;
  bool Restore(std::string_view file);

  jaxllm_device& device;
  std::atomic<bool> busy{false}, cancelled{false};
  std::vector<int32_t> tokens;  // Of the last call's prompt and answer.
  int level = jaxllm::kWhole;

 private:
  std::vector<int32_t> Prompt(const jaxllm_request& request) const;
  void MakeRoom(size_t positions);
  bool Prefill(const std::vector<int32_t>& prompt, std::vector<float>& logits);

  jaxllm::Caches caches_;
  size_t cached_ = 0;  // Of the tokens, those in the caches.
  std::vector<int32_t> answer_;
  std::string text_;
};
