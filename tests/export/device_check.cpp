// Checks of libjaxllm_device in a program of its own, for sanitizers and emulators.
//
//   device_check FOLDER FILE         for each line of ids on stdin: greedy tokens, drafted ones, drawn ones,
//   and those
//                                    of the conversation when it goes on from FILE; and tokens of a text
//   device_check FOLDER ROUNDS SEED  reads harmed files of the folder, and encodes by what is still a
//   tokenizer

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <sstream>

#include "folder.h"
#include "system.h"

namespace {

void Check(jaxllm_status status, const jaxllm_error& error) {
  if (status == JAXLLM_OK) return;
  std::fprintf(stderr, "error: %s\n", error.message);
  std::exit(1);
}

void Print(const char* what, const int32_t* tokens, size_t count) {
  std::printf("%s", what);
  for (size_t each = 0; each < count; ++each) std::printf(" %d", tokens[each]);
  std::printf("\n");
}

int Answers(const char* folder, const char* path) {
  jaxllm_error error;
  jaxllm_device* device = nullptr;
  jaxllm_conversation *talk = nullptr, *again = nullptr;
  Check(jaxllm_open(folder, 1, &device, &error), error);
  Check(jaxllm_conversation_new(device, &talk, &error), error);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream ids(line);
    std::vector<int32_t> prompt{std::istream_iterator<int32_t>(ids), {}};
    jaxllm_request request;
    jaxllm_result result;
    jaxllm_request_init(&request);
    request.tokens = prompt.data();
    request.token_count = prompt.size();
    request.max_tokens = 8;
    request.ignore_end = 1;
    for (const char* kind : {"greedy", "drafted", "drawn"}) {
      request.drafts = kind[1] == 'r' && kind[2] == 'a';
      request.sampling.temperature = kind[3] == 'w' ? 1 : 0;
      request.sampling.seed = 3;
      Check(jaxllm_answer(talk, &request, &result, &error), error);
      Print(kind, result.tokens, result.token_count);
    }
    Check(jaxllm_conversation_save(talk, path, &error), error);
    Check(jaxllm_conversation_load(device, path, &again, nullptr, &error), error);
    request.continues = 1;
    request.max_tokens = 2;
    Check(jaxllm_answer(again, &request, &result, &error), error);
    Print("continued", result.tokens, result.token_count);
    jaxllm_conversation_free(again);
  }
  const std::string text = "It's 12 o'clock,  na\xC3\xAFve \xE4\xBD\xA0\xE5\xA5\xBD\n\n\xF0\x9F\x98\x80 \xFF";
  std::vector<int32_t> tokens(4 * text.size());
  size_t count = tokens.size();
  Check(jaxllm_encode(device, text.data(), text.size(), JAXLLM_BEGIN, tokens.data(), &count, &error), error);
  Print("encoded", tokens.data(), count);
  jaxllm_conversation_free(talk);
  jaxllm_close(device);
  return 0;
}

std::string Content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string Harmed(std::string bytes, std::mt19937& draw) {
  auto place = [&] { return draw() % bytes.size(); };
  for (unsigned changes = 1 + draw() % 4; changes-- && bytes.size() > 1;) {
    constexpr char kLetters[] = "\"{}[]:,\\u0-19e.\0\xFF\xC3 tn";
    size_t at = place();
    switch (draw() % 5) {
      case 0:
        bytes[at] = kLetters[draw() % (sizeof(kLetters) - 1)];
        break;
      case 1:
        bytes.insert(at, bytes.substr(place(), draw() % 40));
        break;
      case 2:
        bytes.erase(at, draw() % 40);
        break;
      case 3:
        bytes[at] = static_cast<char>(bytes[at] ^ 1 << draw() % 8);
        break;
      default:
        if (draw() % 8 == 0) bytes.resize(at + 1);
    }
  }
  return bytes;
}

int Fuzz(const std::string& folder, int rounds, unsigned seed) {
  std::mt19937 draw(seed);
  std::string manifest = Content(folder + "/program.json"), tokenizer = Content(folder + "/tokenizer.json"),
              chat = Content(folder + "/chat.json");
  int read = 0;
  for (int round = 0; round < rounds; ++round) {
    try {
      jaxllm::Tokenizer found(Harmed(tokenizer, draw));
      jaxllm::MarkedText text;
      text.Add(Harmed("Once upon a time, <|end|> 12 \xF0\x9F\x98\x80 it's", draw), round % 2);
      jaxllm::Detokenizer detokenizer(found);
      for (int32_t each : found.Encode(text, true))
        detokenizer.Push(each + static_cast<int32_t>(draw() % 3) - 1);
      detokenizer.Flush();
      ++read;
    } catch (const jaxllm::Failure&) {
    }
    try {
      jaxllm::ChatPieces found(Harmed(chat, draw));
      const jaxllm_message message = {"user", "a", 1};
      found.Render(&message, 1);
      ++read;
    } catch (const jaxllm::Failure&) {
    }
    jaxllm::Descriptor number(memfd_create("manifest", MFD_CLOEXEC)),
        model(memfd_create("model", MFD_CLOEXEC));
    std::string bytes = Harmed(manifest, draw);
    if (write(number.number(), bytes.data(), bytes.size()) < 0) return 1;
    if (write(model.number(), chat.data(), chat.size()) < 0) return 1;
    try {
      const jaxllm_file files[] = {{"program.json", number.number(), 0, -1},
                                   {"model.tflite", model.number(), 0, -1}};
      jaxllm::Folder found(files, 2);
    } catch (const jaxllm::Failure&) {
    }
  }
  std::printf("%d of %d files were still read\n", read, 2 * rounds);
  return 0;
}

}  // namespace

int main(int count, char** values) {
  if (count == 3) return Answers(values[1], values[2]);
  return count == 4 ? Fuzz(values[1], std::atoi(values[2]), static_cast<unsigned>(std::atoi(values[3]))) : 2;
}
