// Reads JSON of files, within bounds: a text of any content ends in a value or in a Failure.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "failure.h"

namespace jaxllm {

class Json {
 public:
  enum Kind : uint8_t { kNull, kFlag, kNumber, kText, kList, kMap };

  // Reads a whole text; `file` is its name in errors.
  static Json Read(std::string_view text, const std::string& file);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }

  // The value of this kind; a Failure otherwise, as for a missing member. `name` is for errors.
  const std::string& text(const char* name) const;
  bool flag(const char* name) const;
  double number(const char* name) const;
  // An integer in [low, high].
  int64_t integer(const char* name, int64_t low, int64_t high) const;
  const std::vector<Json>& list(const char* name) const;
  // Names of a map's members, in the order of `items`.
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<Json>& items() const { return items_; }

  // A member of a map; a null value if there is none, or this is no map.
  const Json& operator[](std::string_view name) const;
  bool absent(std::string_view name) const { return (*this)[name].is(kNull); }

 private:
  friend class JsonReader;
  void Want(Kind kind, const char* name) const;

  Kind kind_ = kNull;
  bool flag_ = false;
  double number_ = 0;
  std::string text_;
  std::vector<Json> items_;
  std::vector<std::string> names_;
};

// Texts of JSON are valid UTF-8.
// Bytes of the character that begins a text: its length if it is whole; 0 if the text ends within it; minus
// the number of bytes that are no text.
int Character(std::string_view text);

// Appends a code point.
void Append(std::string& text, char32_t point);

}  // namespace jaxllm
