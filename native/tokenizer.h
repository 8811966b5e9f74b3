// Reads `tokenizer.json` of a folder of programs, encodes texts and decodes tokens.
//
// Supported are byte-level BPE with GPT-2's splits (the packaged models, SmolLM2), and SentencePiece's BPE
// with bytes for unknown characters (Llama 2). Others are refused by name. Results are those of the
// `tokenizers` library, except that no content becomes a special token.

#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "json.h"

namespace jaxllm {

// A valid UTF-8 text, and for each byte whether it is content: untrusted, so that it makes no special token.
struct MarkedText {
  std::string text;
  std::vector<bool> content;
  // Bytes that are no UTF-8 become U+FFFD.
  void Add(std::string_view part, bool is_content);
};

// A valid text without white space at its ends, as Python strips it.
std::string_view Stripped(std::string_view text);

class Tokenizer {
 public:
  // Reads the text of a folder's tokenizer.json (see `jaxllm.text.tokenizer_files.TokenizerFiles`).
  explicit Tokenizer(std::string_view file);

  // Tokens of a text; `around` adds those that the tokenizer adds to texts.
  std::vector<int32_t> Encode(const MarkedText& text, bool around) const;

  const std::vector<int32_t>& ends() const { return ends_; }

 private:
  friend class Detokenizer;
  struct Added {
    std::string content;
    int32_t id;
    bool control;
  };
  struct Merge {
    uint64_t pair;
    int32_t rank, made;
  };
  enum class Split { kDigits, kGpt2 };
  struct Symbol {
    int32_t id, before, after;
  };

  void ReadAdded(const Json& file, const Json& library);
  void ReadSplits(const Json& part);
  void ReadNormalizer(const Json& part);
  void ReadDecoder(const Json& part) const;
  void ReadModel(const Json& model);
  void ReadAround(const Json& part);
  void AddText(int32_t id, const std::string& name);

  void EncodePart(const MarkedText& text, size_t from, size_t to, size_t list,
                  std::vector<int32_t>& out) const;
  void EncodeSection(std::string_view section, std::vector<int32_t>& out) const;
  void EncodePiece(std::string_view piece, std::vector<int32_t>& out) const;
  const Merge* Find(int32_t left, int32_t right) const;

  bool bytes_ = true;  // Byte-level; else SentencePiece's.
  std::vector<Split> splits_;
  int32_t byte_ids_[256];
  std::unordered_map<std::string, int32_t> letters_;  // SentencePiece's characters.
  std::vector<Merge> merges_;
  // Before the text is normalized, and after; by first byte, longest first.
  std::vector<Added> added_[2][256];
  std::vector<int32_t> before_, after_, ends_;
  // The bytes of each token's text, and what it is.
  enum : uint8_t { kNoText, kText, kByte };
  std::vector<std::string> texts_;
  std::vector<uint8_t> kinds_;
};

// Turns an answer's tokens into text of whole characters.
class Detokenizer {
 public:
  explicit Detokenizer(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  // The text that a token adds, without an incomplete character.
  std::string Push(int32_t token);
  // What is left, at the end.
  std::string Flush();

 private:
  std::string Taken(bool whole);

  const Tokenizer& tokenizer_;
  std::string open_;  // Bytes of an incomplete character.
  bool begun_ = false;
};

// Withholds text that may begin a stop string, and ends at the first of them, which is not shown.
class StopFinder {
 public:
  explicit StopFinder(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  std::string Push(const std::string& text);
  std::string Flush() { return std::exchange(withheld_, {}); }
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string withheld_;
  bool stopped_ = false;
};

}  // namespace jaxllm
