// Opens the files of a folder of programs, by its path or by descriptors, and checks them against the
// manifest.

#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer.h"

namespace jaxllm {

constexpr int kWhole = 100;

// The bytes of a file, mapped.
class Mapped {
 public:
  Mapped(int descriptor, int64_t offset, int64_t bytes, const std::string& name);
  Mapped(const Mapped&) = delete;
  ~Mapped();
  std::string_view view() const { return {data_, bytes_}; }
  // The same bytes, to be changed for this process.
  char* data() { return data_; }
  // Gives back its memory, with what was changed; what is read again comes from the file.
  void GiveBack() const;

 private:
  void* pages_ = nullptr;
  size_t paged_ = 0, bytes_ = 0;
  char* data_ = nullptr;
};

// Of LiteRT's numbers of element types, those of caches, and the bytes of each.
struct ElementType {
  int32_t number;
  size_t bytes;
};

struct Signature {
  std::string kind;  // prefill, decode or verify.
  int level, room, tokens;
};

// What a level answered greedily where its programs were made.
struct GoldenAnswer {
  int level;
  std::vector<int32_t> prompt, tokens;
};

struct Manifest {
  std::string name;
  int context_tokens = 0;
  ElementType cache_type = {};
  std::map<int, int> vocab_sizes;  // By level.
  std::vector<Signature> signatures;
  std::vector<GoldenAnswer> golden;
  std::string model_file, model_checksum, tokenizer_checksum;
};

// How a chat becomes a text, as the export has found (see `jaxllm.export.chat_pieces`).
class ChatPieces {
 public:
  ChatPieces() = default;
  explicit ChatPieces(std::string_view file);
  // Why there is none; empty if there is.
  std::string refused = "the folder has no chat.json; export the model again";
  MarkedText Render(const jaxllm_message* messages, size_t count) const;

 private:
  std::map<std::string, std::string> between_, end_;
  std::vector<std::string> stripped_;
};

struct Folder {
  // By path; or by descriptors.
  explicit Folder(const std::string& path);
  Folder(const jaxllm_file* files, size_t count);

  Manifest manifest;
  std::unique_ptr<Mapped> model;
  std::unique_ptr<Tokenizer> tokenizer;
  ChatPieces chat;

 private:
  void Read(const std::map<std::string, std::unique_ptr<Mapped>>& files);
};

}  // namespace jaxllm
