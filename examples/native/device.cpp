// Answers by a folder of exported programs: the smallest user of native/jaxllm_device.h.
//
//   device FOLDER (--chat TEXT | --prompt TEXT | --tokens "1 50 7") [--max-tokens N] [--slo TTFT,TPOT]
//          [--profile FILE] [--level L] [--temperature T] [--seed N] [--stop TEXT] [--stop-token ID]
//          [--draft 1] [--conversation FILE] [--threads N]
//
// The answer comes on stdout as it is drawn: text, or with --tokens a line for each token. What was planned
// and computed is a line on stderr. Objectives are percentages of the whole model's times, as `--slo` of
// jaxllm has them. With --conversation the file's conversation goes on by --prompt or --tokens, and is
// written back.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "jaxllm_device.h"

namespace {

using Options = std::map<std::string, std::string>;

[[noreturn]] void Fail(const std::string& message) {
  std::fprintf(stderr, "error: %s\n", message.c_str());
  std::exit(1);
}

jaxllm_error error;

void Check(jaxllm_status status) {
  if (status != JAXLLM_OK) Fail(error.message);
}

Options Read(int count, char** values) {
  Options found;
  const std::string known =
      " --chat --prompt --tokens --max-tokens --slo --profile --level --temperature --seed --stop "
      "--stop-token --draft"
      " --conversation --threads ";
  for (int at = 1; at < count; ++at) {
    std::string name = values[at];
    if (name.rfind("--", 0) != 0) {
      found["folder"] = name;
      continue;
    }
    if (known.find(" " + name + " ") == known.npos) Fail("no such option: " + name);
    if (at + 1 == count) Fail(name + " takes a value");
    found[name] = values[++at];
  }
  return found;
}

int Print(void* by_token, int32_t token, const char* text, size_t bytes) {
  if (!by_token)
    std::fwrite(text, 1, bytes, stdout);
  else if (token >= 0)
    std::printf("%d\n", token);
  return std::fflush(stdout);
}

}  // namespace

int main(int count, char** values) {
  Options options = Read(count, values);
  auto has = [&](const char* name) { return options.count(name) > 0; };
  static const std::string kNone;
  auto text = [&](const char* name) -> const std::string& { return has(name) ? options[name] : kNone; };
  auto number = [&](const char* name, double otherwise) {
    if (!has(name)) return otherwise;
    char* end = nullptr;
    double found = std::strtod(options[name].c_str(), &end);
    if (end == options[name].c_str() || *end)
      Fail(std::string(name) + " takes a number, got " + options[name]);
    return found;
  };
  if (!has("folder") || has("--chat") + has("--prompt") + has("--tokens") != 1)
    Fail("give a folder, and one of --chat, --prompt and --tokens");

  jaxllm_device* device = nullptr;
  Check(jaxllm_open(text("folder").c_str(), static_cast<int32_t>(number("--threads", 0)), &device, &error));
  jaxllm_conversation* conversation = nullptr;
  const char* kept = has("--conversation") ? text("--conversation").c_str() : nullptr;
  FILE* there = kept ? std::fopen(kept, "rb") : nullptr;
  if (there) {
    std::fclose(there);
    int32_t recomputes = 0;
    Check(jaxllm_conversation_load(device, kept, &conversation, &recomputes, &error));
  } else {
    Check(jaxllm_conversation_new(device, &conversation, &error));
  }

  jaxllm_request request;
  jaxllm_request_init(&request);
  jaxllm_message message = {"user", text("--chat").c_str(), text("--chat").size()};
  std::vector<int32_t> tokens;
  std::istringstream ids(text("--tokens"));
  for (int32_t each = 0; ids >> each;) tokens.push_back(each);
  if (has("--chat")) request.messages = &message, request.message_count = 1;
  if (has("--prompt")) request.text = text("--prompt").c_str(), request.text_bytes = text("--prompt").size();
  if (has("--tokens")) request.tokens = tokens.data(), request.token_count = tokens.size();
  request.continues = there != nullptr && !has("--chat");

  jaxllm_objective objective = {};
  if (has("--slo")) {
    if (std::sscanf(text("--slo").c_str(), "%lf,%lf", &objective.first_share, &objective.token_share) != 2)
      Fail("--slo takes two percentages, like 40,70, got " + text("--slo"));
    objective.first_share /= 100, objective.token_share /= 100;
    Check(jaxllm_profile(device, has("--profile") ? text("--profile").c_str() : nullptr, &error));
    request.objective = &objective;
  }
  const char* stop = text("--stop").c_str();
  auto stop_token = static_cast<int32_t>(number("--stop-token", 0));
  if (has("--stop")) request.stops = &stop, request.stop_count = 1;
  if (has("--stop-token")) request.stop_tokens = &stop_token, request.stop_token_count = 1;
  request.ignore_end = has("--tokens");
  request.max_tokens = static_cast<int32_t>(number("--max-tokens", 32));
  request.level = static_cast<int32_t>(number("--level", 0));
  request.sampling.temperature = static_cast<float>(number("--temperature", 0));
  request.sampling.seed = static_cast<uint64_t>(number("--seed", 0));
  request.drafts = number("--draft", 0) != 0;
  request.on_token = Print;
  request.user = has("--tokens") ? &request : nullptr;

  jaxllm_result result;
  Check(jaxllm_answer(conversation, &request, &result, &error));
  if (!has("--tokens")) std::printf("\n");
  std::fprintf(stderr,
               "level %d%s, %.2f ms to the first token (%.2f expected), %zu of %zu prompt tokens reused, "
               "%zu of %zu drafted tokens accepted\n",
               result.plan.level, result.plan.met ? "" : " (no level meets the objective)", result.first_ms,
               result.plan.first_ms, result.reused_tokens, result.prompt_tokens, result.accepted_tokens,
               result.drafted_tokens);
  if (kept) Check(jaxllm_conversation_save(conversation, kept, &error));
  jaxllm_conversation_free(conversation);
  jaxllm_close(device);
  return 0;
}
