#include <fcntl.h>
#include <sys/stat.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include "checksum.h"
#include "device.h"
#include "system.h"

namespace jaxllm {
namespace {

constexpr size_t kMostProfileBytes = 1 << 16;
constexpr int kRuns = 6;  // The first packs weights.
constexpr double kLongestMs = 1e9;

std::vector<std::pair<int, int>> Steps(const Programs& programs) {
  std::vector<std::pair<int, int>> found;
  for (int level : programs.Levels()) {
    found.emplace_back(level, 1);
    // A chunk of one token is told from decoding by nothing, and costs as much.
    for (int each : programs.Sizes("prefill", level, programs.Rooms(level).front()))
      if (each > 1) found.emplace_back(level, each);
  }
  return found;
}

bool Read(const std::string& path, const std::string& head, const std::vector<std::pair<int, int>>& steps,
          Times& times) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kMostProfileBytes + 1, '\0');
  text.resize(static_cast<size_t>(file.read(text.data(), static_cast<long>(text.size())).gcount()));
  size_t rows = text.find('\n'), last = text.rfind("checksum ");
  if (text.size() > kMostProfileBytes || last == text.npos || rows >= last || text.substr(0, rows) != head ||
      text.substr(last) != "checksum " + ChecksumOf(text.substr(0, last)) + "\n")
    return false;
  std::istringstream lines(text.substr(rows, last - rows));
  int level = 0, tokens = 0;
  for (double spent = 0; lines >> level >> tokens >> spent;)
    if (spent > 0 && spent < kLongestMs) times[{level, tokens}] = spent;
  return std::all_of(steps.begin(), steps.end(), [&](auto& each) { return times.count(each); }) &&
         times.size() == steps.size();
}

Times Measured(Programs& programs, const std::vector<std::pair<int, int>>& steps) {
  Times times;
  for (auto [level, tokens] : steps) {
    Caches caches = programs.Made(level, programs.Rooms(level).front());
    std::vector<int32_t> row(static_cast<size_t>(tokens), 0);
    std::vector<double> spent;
    std::vector<float> logits;
    for (int run = 0; run < kRuns; ++run) {
      auto began = std::chrono::steady_clock::now();
      programs.Run(tokens == 1 ? "decode" : "prefill", tokens, caches, row.data(), tokens, 0, &logits);
      spent.push_back(
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count());
    }
    std::sort(spent.begin() + 1, spent.end());
    times[{level, tokens}] = std::max(1e-6, spent[kRuns / 2]);
  }
  return times;
}

}  // namespace

std::string Processor() {
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> lines;
  for (std::string line; std::getline(file, line);)
    for (const char* name : {"model name", "flags", "Features", "CPU part", "Hardware"})
      if (line.rfind(name, 0) == 0) lines.insert(line);
  struct utsname system;
  std::string found = uname(&system) == 0 ? system.machine : "";
  for (const std::string& each : lines) found += each;
  return ChecksumOf(found) + " " + std::to_string(sysconf(_SC_NPROCESSORS_ONLN));
}

std::string ChecksumOf(std::string bytes) {
  bytes.resize(std::max(bytes.size(), kLeastChecked));
  return Checksum(bytes.data(), bytes.size());
}

Times ProfiledTimes(Programs& programs, const Manifest& manifest, const char* path) {
  std::string head = "jaxllm-device-profile 1 " + manifest.model_checksum + " " +
                     std::to_string(programs.threads()) + " " + Processor();
  std::vector<std::pair<int, int>> steps = Steps(programs);
  Times times;
  if (path && Read(path, head, steps, times)) return times;
  times = Measured(programs, steps);
  if (!path) return times;
  std::string text = head + "\n";
  char line[80];
  for (const auto& [step, spent] : times) {
    std::snprintf(line, sizeof(line), "%d %d %.6f\n", step.first, step.second, spent);
    text += line;
  }
  WriteFile(path, text + "checksum " + ChecksumOf(text) + "\n");
  return times;
}

double TokenMs(const Times& times, int level) { return times.at({level, 1}); }

double FirstTokenMs(const Times& times, int level, size_t prompt_tokens, size_t reused_tokens) {
  std::vector<int> lengths;
  for (const auto& [step, spent] : times)
    if (step.first == level && step.second > 1) lengths.push_back(step.second);
  int missing = static_cast<int>(prompt_tokens - std::min(prompt_tokens, reused_tokens));
  // The last token is decoded.
  double total = TokenMs(times, level) * (lengths.empty() ? missing : 1);
  for (int each : lengths.empty() ? lengths : PlannedChunks(missing - 1, lengths))
    total += times.at({level, each});
  return total;
}

void WriteAll(int descriptor, const std::string& bytes) {
  for (size_t at = 0; at < bytes.size();) {
    ssize_t wrote = write(descriptor, bytes.data() + at, bytes.size() - at);
    if (wrote < 0 && errno == EINTR) continue;
    Require(wrote > 0, JAXLLM_SYSTEM, std::string("the file cannot be written: ") + std::strerror(errno));
    at += static_cast<size_t>(wrote);
  }
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::string name = path + ".XXXXXX";
  auto refuse = [&] { throw Failure(JAXLLM_SYSTEM, path + " cannot be written: " + std::strerror(errno)); };
  // Readable by this user alone.
  Descriptor file(mkostemp(name.data(), O_CLOEXEC));
  if (file.number() < 0) refuse();
  try {
    WriteAll(file.number(), bytes);
    if (fsync(file.number()) != 0 || rename(name.c_str(), path.c_str()) != 0) refuse();
  } catch (...) {
    unlink(name.c_str());
    throw;
  }
  size_t slash = path.rfind('/');
  Descriptor folder(open(slash == path.npos ? "." : path.substr(0, slash + 1).c_str(), O_RDONLY | O_CLOEXEC));
  if (folder.number() >= 0) fsync(folder.number());
}

}  // namespace jaxllm

jaxllm_plan jaxllm_device::Plan(const jaxllm_objective& asked, size_t prompt_tokens,
                                const std::map<int, size_t>& reused) const {
  using namespace jaxllm;
  for (double each : {asked.first_share, asked.token_share, asked.first_ms, asked.token_ms})
    Require(each >= 0 && each <= kLongestMs, JAXLLM_INVALID, "an objective's numbers must not be negative");
  std::lock_guard<std::mutex> lock(timing);
  Require(!times.empty(), JAXLLM_INVALID, "objectives need times of this device; call jaxllm_profile first");
  auto plan = [&](int level) {
    auto cached = reused.find(level);
    return jaxllm_plan{level, 0,
                       FirstTokenMs(times, level, prompt_tokens, cached == reused.end() ? 0 : cached->second),
                       TokenMs(times, level)};
  };
  double whole_first = FirstTokenMs(times, kWhole, prompt_tokens, 0), whole_token = TokenMs(times, kWhole);
  auto within = [](double spent, double limit) { return limit == 0 || spent <= limit; };
  jaxllm_plan best{}, fastest = plan(kWhole);
  for (int level : levels) {
    jaxllm_plan each = plan(level);
    if (within(each.first_ms, asked.first_ms) && within(each.token_ms, asked.token_ms) &&
        within(each.first_ms, asked.first_share * whole_first) &&
        within(each.token_ms, asked.token_share * whole_token))
      best = each;
    if (each.first_ms < fastest.first_ms) fastest = each;
  }
  best.met = best.level != 0;
  Require(best.met || !asked.strict, JAXLLM_MISSED,
          "no level meets the objective: level " + std::to_string(fastest.level) +
              " comes nearest; ask for more time, "
              "or without strict");
  return best.met ? best : fastest;
}
