// Answers prompts over a folder of exported TFLite programs, by the C API of LiteRT alone.
//
//   device FOLDER --prompt "1 50 7" [--max-tokens N] [--slo TTFT,TPOT] [--level L] [--profile FILE]
//          [--stop ID] [--threads N]
//
// Tokens are ids: an app has its tokenizer from tokenizer.json. Objectives are percentages of the whole
// model's times, as `--slo` of jaxllm has them. Each token is a line on stdout as soon as it is drawn
// (greedily); the plan is a line on stderr. Programs and their conventions: docs/guides/export.md.

#include <sys/stat.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "model.h"

namespace {

double Milliseconds(const std::function<void()>& work) {
  auto began = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
}

// Lengths of the chunks of `tokens` tokens; those that are left, and fit no chunk within the cache, are
// decoded.
std::vector<int> PlannedChunks(const std::vector<int>& lengths, int tokens, int room) {
  std::vector<int> found;
  for (int at = 0; at < tokens && !lengths.empty();) {
    int left = tokens - at, chosen = 0;
    for (int each : lengths)
      if (each <= left) chosen = each;
    // A padded chunk costs as much as a full one, and must not reach beyond the cache.
    if (!chosen && 2 * left >= lengths.front() && at + lengths.front() <= room) chosen = lengths.front();
    if (!chosen) break;
    found.push_back(chosen);
    at += chosen;
  }
  return found;
}

class Device {
 public:
  explicit Device(Model& model) : model_(model) {}

  // Milliseconds of every program of the shortest caches, by level and tokens of a step; from `path` if the
  // file is of this model and these threads, else measured and kept there.
  void Profile(const std::string& path, const std::string& key) {
    std::ifstream file(path);
    std::string line;
    if (file && std::getline(file, line) && line == key) {
      int level = 0, tokens = 0;
      for (double spent = 0; file >> level >> tokens >> spent;) times_[{level, tokens}] = spent;
      return;
    }
    for (int level : model_.Levels()) {
      int cache = model_.CacheFor(level, 1);
      std::vector<int> lengths = model_.Chunks(level, cache);
      lengths.push_back(1);
      for (int each : lengths) {
        std::vector<double> spent;
        for (int run = 0; run < 6; ++run) {
          model_.Start(level, cache);
          spent.push_back(Milliseconds([&] {
            model_.Run(each == 1 ? "decode" : "prefill", level, cache, each, std::vector<int32_t>(each, 1),
                       0);
          }));
        }
        // The first run packs weights.
        std::sort(spent.begin() + 1, spent.end());
        times_[{level, each}] = spent[3];
      }
    }
    if (path.empty()) return;
    std::ofstream out(path);
    out << key << "\n";
    for (const auto& [what, spent] : times_) out << what.first << " " << what.second << " " << spent << "\n";
  }

  double FirstToken(int level, int prompt) const {
    std::vector<int> lengths;
    for (const auto& [what, spent] : times_)
      if (what.first == level && what.second > 1) lengths.push_back(what.second);
    double total = 0;
    int fed = 0;
    for (int each : PlannedChunks(lengths, prompt - 1, 1 << 30)) {
      total += times_.at({level, each});
      fed += each;
    }
    return total + std::max(1, prompt - fed) * Token(level);
  }
  double Token(int level) const { return times_.at({level, 1}); }

  // The largest level whose times are within these shares of the whole model's; the fastest if none is.
  int Plan(int prompt, double first_share, double token_share, bool& met) const {
    int best = 0, fastest = kWhole;
    for (int level : model_.Levels()) {
      if (FirstToken(level, prompt) <= first_share * FirstToken(kWhole, prompt) &&
          Token(level) <= token_share * Token(kWhole))
        best = level;
      if (FirstToken(level, prompt) < FirstToken(fastest, prompt)) fastest = level;
    }
    met = best != 0;
    return met ? best : fastest;
  }

  void Answer(int level, const std::vector<int32_t>& prompt, int most, const std::vector<int>& stops) {
    int cache = model_.CacheFor(level, static_cast<int>(prompt.size()) + most), at = 0;
    int last = static_cast<int>(prompt.size()) - 1;
    model_.Start(level, cache);
    for (int each : PlannedChunks(model_.Chunks(level, cache), last, model_.Room(level, cache))) {
      int real = std::min(each, last - at);
      model_.Run("prefill", level, cache, each, {prompt.begin() + at, prompt.begin() + at + real}, at);
      at += real;
    }
    int token = 0;
    for (int count = 0; count < most;) {
      bool inside = at < last;
      token = at <= last ? prompt[at] : token;
      Program& step = model_.Run("decode", level, cache, 1, {token}, at++);
      if (inside) continue;
      step.outputs.at("logits")->Locked(kReading, [&](void* from, size_t bytes) {
        const float* logits = static_cast<const float*>(from);
        token = static_cast<int>(std::max_element(logits, logits + bytes / sizeof(float)) - logits);
      });
      ++count;
      std::printf("%d\n", token);
      std::fflush(stdout);
      if (std::find(stops.begin(), stops.end(), token) != stops.end()) break;
    }
  }

 private:
  Model& model_;
  std::map<std::pair<int, int>, double> times_;
};

int Main(const std::vector<std::string>& arguments) {
  std::string folder, prompt_text, slo, profile;
  int most = 32, level = 0, threads = 0;
  std::vector<int> stops;
  for (size_t at = 0; at < arguments.size(); ++at) {
    const std::string& name = arguments[at];
    if (name.rfind("--", 0) != 0) {
      folder = name;
      continue;
    }
    if (at + 1 == arguments.size()) throw std::runtime_error(name + " takes a value");
    const std::string& value = arguments[++at];
    if (name == "--prompt")
      prompt_text = value;
    else if (name == "--max-tokens")
      most = std::stoi(value);
    else if (name == "--slo")
      slo = value;
    else if (name == "--level")
      level = std::stoi(value);
    else if (name == "--profile")
      profile = value;
    else if (name == "--stop")
      stops.push_back(std::stoi(value));
    else if (name == "--threads")
      threads = std::stoi(value);
    else
      throw std::runtime_error("no such option: " + name);
  }
  std::vector<int32_t> prompt;
  std::istringstream ids(prompt_text);
  for (int32_t each = 0; ids >> each;) prompt.push_back(each);
  if (folder.empty() || prompt.empty())
    throw std::runtime_error("give a folder, and --prompt with ids of tokens");
  std::string path = folder + "/model.tflite";
  struct stat facts;
  if (stat(path.c_str(), &facts) != 0)
    throw std::runtime_error(path + ": no such file; export with `jaxllm export --format device` or tflite");
  Model model(path, threads);
  Device device(model);
  if (!slo.empty()) {
    double first = 0, token = 0;
    if (std::sscanf(slo.c_str(), "%lf,%lf", &first, &token) != 2)
      throw std::runtime_error("--slo takes two percentages, like 40,70, got " + slo);
    device.Profile(profile, std::to_string(facts.st_size) + " " + std::to_string(facts.st_mtime) + " " +
                                std::to_string(threads));
    bool met = false;
    level = device.Plan(static_cast<int>(prompt.size()), first / 100, token / 100, met);
    std::fprintf(stderr, "plan: level %d%s, %.2f ms to the first token, %.2f ms for each further\n", level,
                 met ? "" : " (no level meets the objective)", device.FirstToken(level, prompt.size()),
                 device.Token(level));
  }
  device.Answer(level ? level : kWhole, prompt, most, stops);
  return 0;
}

}  // namespace

int main(int count, char** values) {
  try {
    return Main({values + 1, values + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
