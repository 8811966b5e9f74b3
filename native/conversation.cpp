#include <algorithm>
#include <chrono>
#include <cstring>

#include "device.h"

namespace {

using namespace jaxllm;

constexpr std::string_view kMagic = "JAXLLMC1";
constexpr size_t kMostStops = 16, kMostStopBytes = 1024, kChecksumDigits = 32;
constexpr int32_t kMostAnswer = 1 << 20;

double Now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

size_t CommonPrefix(const std::vector<int32_t>& a, size_t a_size, const std::vector<int32_t>& b,
                    size_t b_size) {
  size_t found = 0;
  while (found < std::min(a_size, b_size) && a[found] == b[found]) ++found;
  return found;
}

std::vector<std::string> StopsOf(const jaxllm_request& request) {
  Require(request.stop_count <= kMostStops && (!request.stop_count || request.stops), JAXLLM_INVALID,
          "at most 16 stop texts are allowed");
  std::vector<std::string> found;
  for (size_t each = 0; each < request.stop_count; ++each) {
    found.emplace_back(request.stops[each] ? request.stops[each] : "");
    Require(!found.back().empty() && found.back().size() <= kMostStopBytes, JAXLLM_INVALID,
            "a stop text must have 1 to 1,024 bytes");
  }
  return found;
}

// What is written of an answer, as its tokens come.
class Writer {
 public:
  Writer(const jaxllm_request& request, const Tokenizer& tokenizer, std::string& text)
      : request_(request), detokenizer_(tokenizer), finder_(StopsOf(request)), text_(text) {
    if (!request.ignore_end) ends_ = tokenizer.ends();
    Require(!request.stop_token_count || request.stop_tokens, JAXLLM_INVALID,
            "there are no stop tokens; give them");
    ends_.insert(ends_.end(), request.stop_tokens, request.stop_tokens + request.stop_token_count);
  }

  // Writes a token; returns whether the answer goes on.
  bool Push(int32_t token) {
    bool ends = std::find(ends_.begin(), ends_.end(), token) != ends_.end();
    // A stop token has no text.
    std::string piece = ends ? "" : finder_.Push(detokenizer_.Push(token));
    Tell(token, piece);
    stopped = ends || finder_.stopped();
    return !stopped && !refused;
  }

  void Flush() {
    std::string rest = finder_.Push(detokenizer_.Flush());
    stopped = stopped || finder_.stopped();
    rest += finder_.Flush();
    if (!rest.empty()) Tell(-1, rest);
  }

  bool stopped = false, refused = false;

 private:
  void Tell(int32_t token, const std::string& piece) {
    text_ += piece;
    if (request_.on_token && request_.on_token(request_.user, token, piece.data(), piece.size()) != 0)
      refused = true;
  }

  const jaxllm_request& request_;
  Detokenizer detokenizer_;
  StopFinder finder_;
  std::vector<int32_t> ends_;
  std::string& text_;
};

void Put(std::string& to, uint64_t number) {
  to.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

// Takes parts of a file from its beginning.
struct Reader {
  std::string_view left;
  std::string_view Take(size_t bytes) {
    Require(bytes <= left.size(), JAXLLM_DAMAGED, "the file of the conversation is truncated; delete it");
    std::string_view part = left.substr(0, bytes);
    left.remove_prefix(bytes);
    return part;
  }
  uint64_t Number() {
    uint64_t found;
    std::memcpy(&found, Take(sizeof(found)).data(), sizeof(found));
    return found;
  }
};

}  // namespace

std::vector<int32_t> jaxllm_conversation::Prompt(const jaxllm_request& request) const {
  int kinds = (request.messages != nullptr) + (request.text != nullptr) + (request.tokens != nullptr);
  Require(kinds == 1, JAXLLM_INVALID, "give exactly one of messages, text and tokens");
  const Folder& folder = device.folder;
  if (request.messages) {
    Require(!request.continues, JAXLLM_INVALID,
            "messages are a whole chat; give all of it, without `continues`");
    return folder.tokenizer->Encode(folder.chat.Render(request.messages, request.message_count), false);
  }
  std::vector<int32_t> found = request.continues ? tokens : std::vector<int32_t>{};
  std::vector<int32_t> own;
  if (request.text) {
    MarkedText text;
    text.Add({request.text, request.text_bytes}, !(request.text_flags & JAXLLM_SPECIAL));
    own = folder.tokenizer->Encode(text, (request.text_flags & JAXLLM_BEGIN) && found.empty());
  } else {
    own.assign(request.tokens, request.tokens + request.token_count);
  }
  found.insert(found.end(), own.begin(), own.end());
  int vocab = device.vocab(kWhole);
  for (int32_t each : found)
    Require(each >= 0 && each < vocab, JAXLLM_INVALID,
            "token " + std::to_string(each) + " is not of the vocabulary of " + std::to_string(vocab));
  Require(!found.empty(), JAXLLM_INVALID, "the prompt has no tokens; give some");
  return found;
}

void jaxllm_conversation::MakeRoom(size_t positions) {
  if (caches_.room >= static_cast<int>(positions)) return;
  for (int room : device.programs.Rooms(level)) {
    if (room < static_cast<int>(positions)) continue;
    caches_ = cached_ ? device.programs.Grown(caches_, room, static_cast<int>(cached_))
                      : device.programs.Made(level, room);
    return;
  }
  throw Failure(JAXLLM_NO_ROOM,
                "no caches hold " + std::to_string(positions) +
                    " tokens; shorten the prompt, or export the model with a longer --context");
}

bool jaxllm_conversation::Prefill(const std::vector<int32_t>& prompt, std::vector<float>& logits) {
  Programs& programs = device.programs;
  int missing = static_cast<int>(prompt.size() - cached_) - 1;
  std::vector<int> lengths = programs.Sizes("prefill", level, caches_.room);
  // Chunks of the longest caches, each in the chunks that these have.
  for (int chunk : PlannedChunks(missing, programs.Sizes("prefill", level, programs.Rooms(level).back()))) {
    int left = std::min(chunk, static_cast<int>(prompt.size() - cached_) - 1);
    for (int each : PlannedChunks(left, lengths)) {
      if (cancelled) return false;
      int count = std::min(each, left);
      programs.Run("prefill", each, caches_, prompt.data() + cached_, count, static_cast<int>(cached_),
                   nullptr);
      cached_ += static_cast<size_t>(count);
      left -= count;
    }
  }
  if (cancelled) return false;
  programs.Run("decode", 1, caches_, &prompt.back(), 1, static_cast<int>(cached_), &logits);
  ++cached_;
  return true;
}

void jaxllm_conversation::Answer(const jaxllm_request& request, jaxllm_result* result) {
  double began = Now();
  Require(request.size == sizeof(jaxllm_request), JAXLLM_INVALID,
          "the request is of another version of the library; fill it by jaxllm_request_init");
  Require(request.max_tokens >= 1 && request.max_tokens <= kMostAnswer, JAXLLM_INVALID,
          "max_tokens must be 1 to 1,048,576");
  std::vector<int32_t> prompt = Prompt(request);
  auto context = static_cast<size_t>(device.folder.manifest.context_tokens);
  Require(prompt.size() < context, JAXLLM_NO_ROOM,
          "the prompt has " + std::to_string(prompt.size()) + " tokens, and programs have room for " +
              std::to_string(context) +
              " with the answer; shorten it, or export the model with a longer --context");
  size_t most = std::min(static_cast<size_t>(request.max_tokens), context - prompt.size());
  size_t reused = CommonPrefix(tokens, cached_, prompt, prompt.size() - 1);
  jaxllm_plan plan{request.level ? request.level : level, 1, 0, 0};
  if (request.objective) {
    Require(!request.level, JAXLLM_INVALID, "give a level or an objective, not both");
    plan = device.Plan(*request.objective, prompt.size(), {{level, reused}});
  }
  Require(std::count(device.levels.begin(), device.levels.end(), plan.level), JAXLLM_UNSUPPORTED,
          "level " + std::to_string(plan.level) + " was not exported; export the model with --level " +
              std::to_string(plan.level));
  Sampler sampler(request.sampling, prompt, device.vocab(plan.level));
  answer_.clear();
  text_.clear();
  Writer writer(request, *device.folder.tokenizer, text_);
  if (plan.level != level) {
    // The caches of another level have other shapes.
    caches_ = {};
    cached_ = reused = 0;
    level = plan.level;
  }
  cached_ = reused;
  tokens = prompt;
  *result = {};
  result->plan = plan;
  result->prompt_tokens = prompt.size();
  result->reused_tokens = reused;
  MakeRoom(prompt.size());
  std::vector<float> logits;
  bool more = Prefill(prompt, logits);
  if (more) {
    tokens.push_back(sampler.Next(logits.data()));
    result->first_ms = Now() - began;
  }
  auto push = [&](int32_t token) {
    answer_.push_back(token);
    return writer.Push(token) && answer_.size() < most;
  };
  more = more && push(tokens.back());
  Lookup lookup;
  auto vocab = static_cast<size_t>(device.vocab(level));
  while (more && !cancelled) {
    double step_began = Now();
    std::vector<int32_t> line = {tokens.back()};
    int size = 1;
    if (request.drafts) {
      std::vector<int> sizes = device.programs.Sizes("verify", level, device.programs.Rooms(level).back());
      size_t left = std::min(
          {most - answer_.size(), context - cached_, sizes.empty() ? 1 : static_cast<size_t>(sizes.back())});
      std::vector<int32_t> drafted = lookup.Draft(tokens, left - 1);
      line.insert(line.end(), drafted.begin(), drafted.end());
      if (!drafted.empty()) {
        auto fits = std::lower_bound(sizes.begin(), sizes.end(), static_cast<int>(line.size()));
        size = *fits;
        // A program writes all of its rows.
        if (cached_ + static_cast<size_t>(size) > context) line.resize(1), size = 1;
      }
    }
    MakeRoom(cached_ + static_cast<size_t>(size));
    if (size > 1) {
      // Short caches may lack the program.
      std::vector<int> there = device.programs.Sizes("verify", level, caches_.room);
      if (!std::count(there.begin(), there.end(), size)) line.resize(1), size = 1;
    }
    device.programs.Run(size > 1 ? "verify" : "decode", size, caches_, line.data(),
                        static_cast<int>(line.size()), static_cast<int>(cached_), &logits);
    result->drafted_tokens += line.size() - 1;
    size_t accepted = 0;
    for (; more && accepted < line.size(); ++accepted) {
      if (accepted && tokens.back() != line[accepted]) break;
      // The token's row is in the caches.
      ++cached_;
      tokens.push_back(sampler.Next(logits.data() + accepted * vocab));
      result->accepted_tokens += accepted > 0;
      more = push(tokens.back());
    }
    lookup.Learn(size > 1, Now() - step_began, accepted);
  }
  writer.Flush();
  result->finish = writer.stopped                        ? JAXLLM_STOPPED
                   : more || cancelled || writer.refused ? JAXLLM_CANCELLED
                                                         : JAXLLM_LENGTH;
  result->tokens = answer_.data();
  result->token_count = answer_.size();
  result->text = text_.c_str();
  result->text_bytes = text_.size();
  result->total_ms = Now() - began;
}

std::string jaxllm_conversation::Stored() const {
  const Manifest& manifest = device.folder.manifest;
  std::string found(kMagic);
  for (const std::string* each : {&manifest.model_checksum, &manifest.tokenizer_checksum}) {
    Put(found, each->size());
    found += *each;
  }
  Put(found, static_cast<uint64_t>(level));
  Put(found, tokens.size());
  Put(found, cached_);
  found.append(reinterpret_cast<const char*>(tokens.data()), 4 * tokens.size());
  if (cached_) found += device.programs.Rows(caches_, static_cast<int>(cached_));
  return found + ChecksumOf(found);
}

bool jaxllm_conversation::Restore(std::string_view file) {
  Reader reader{file};
  Require(file.substr(0, kMagic.size()) == kMagic, JAXLLM_DAMAGED,
          "the file is no conversation of this library; give one of jaxllm_conversation_save");
  Require(file.size() > kChecksumDigits, JAXLLM_DAMAGED,
          "the file of the conversation is truncated; delete it");
  std::string_view body = file.substr(0, file.size() - kChecksumDigits);
  Require(ChecksumOf(std::string(body)) == file.substr(body.size()), JAXLLM_DAMAGED,
          "the file of the conversation is damaged; delete it");
  reader.left = body.substr(kMagic.size());
  const Manifest& manifest = device.folder.manifest;
  std::string_view model = reader.Take(reader.Number()), tokenizer = reader.Take(reader.Number());
  Require(tokenizer == manifest.tokenizer_checksum, JAXLLM_UNSUPPORTED,
          "the conversation's tokens are of another tokenizer; begin another one");
  uint64_t stored_level = reader.Number(), count = reader.Number(), cached = reader.Number();
  auto context = static_cast<uint64_t>(manifest.context_tokens);
  Require(cached <= count, JAXLLM_DAMAGED, "the file of the conversation is damaged; delete it");
  Require(count <= context, JAXLLM_NO_ROOM,
          "the conversation has more tokens than these programs' caches; begin another one");
  std::string_view row = reader.Take(4 * count);
  std::vector<int32_t> found(count);
  if (count) std::memcpy(found.data(), row.data(), row.size());
  for (int32_t each : found)
    Require(each >= 0 && each < device.vocab(kWhole), JAXLLM_DAMAGED,
            "the conversation has tokens of no vocabulary");
  tokens = std::move(found);
  int wanted = static_cast<int>(std::min<uint64_t>(stored_level, kWhole));
  bool known = stored_level <= kWhole && std::count(device.levels.begin(), device.levels.end(), wanted);
  level = known ? wanted : kWhole;
  if (model != manifest.model_checksum || !known) return count > 0;
  std::string_view rows = reader.Take(cached * device.programs.RowBytes(level));
  Require(reader.left.empty(), JAXLLM_DAMAGED, "the file of the conversation is damaged; delete it");
  if (!cached) return count > 0;
  MakeRoom(cached);
  device.programs.Restore(caches_, rows.data(), static_cast<int>(cached));
  cached_ = cached;
  return false;
}
