#include "json.h"

#include <cmath>
#include <cstdlib>

namespace jaxllm {
namespace {

constexpr int kMostDepth = 64;

}  // namespace

void Append(std::string& text, char32_t point) {
  if (point < 0x80) {
    text += static_cast<char>(point);
    return;
  }
  int more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
  constexpr int kFirst[] = {0, 0xC0, 0xE0, 0xF0};
  text += static_cast<char>(kFirst[more] | (point >> (6 * more)));
  while (more--) text += static_cast<char>(0x80 | ((point >> (6 * more)) & 0x3F));
}

int Character(std::string_view text) {
  auto byte = [&](size_t at) { return static_cast<unsigned char>(text[at]); };
  unsigned char first = byte(0);
  if (first < 0x80) return 1;
  int more = first >= 0xC2 && first < 0xE0   ? 1
             : (first & 0xF0) == 0xE0        ? 2
             : first >= 0xF0 && first < 0xF5 ? 3
                                             : 0;
  if (!more) return -1;
  for (int at = 1; at <= more; ++at) {
    if (static_cast<size_t>(at) == text.size()) return 0;
    unsigned char next = byte(at), low = 0x80, high = 0xBF;
    if (at == 1 && first == 0xE0) low = 0xA0;
    if (at == 1 && first == 0xED) high = 0x9F;
    if (at == 1 && first == 0xF0) low = 0x90;
    if (at == 1 && first == 0xF4) high = 0x8F;
    if (next < low || next > high) return -at;
  }
  return more + 1;
}

class JsonReader {
 public:
  JsonReader(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  Json Whole() {
    Json found = Value(0);
    Skip();
    if (at_ != text_.size()) Bad();
    return found;
  }

 private:
  [[noreturn]] void Bad() const {
    throw Failure(JAXLLM_DAMAGED,
                  file_ + ": malformed JSON at byte " + std::to_string(at_) + "; export the model again");
  }
  char Peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void Skip() {
    while (at_ < text_.size() && (Peek() == ' ' || Peek() == '\n' || Peek() == '\t' || Peek() == '\r')) ++at_;
  }
  bool Take(char wanted) {
    Skip();
    if (Peek() != wanted || at_ == text_.size()) return false;
    ++at_;
    return true;
  }
  void Word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) Bad();
    at_ += word.size();
  }

  Json Value(int depth) {
    Json found;
    if (depth > kMostDepth) Bad();
    Skip();
    switch (Peek()) {
      case '{':
      case '[': {
        bool map = text_[at_++] == '{';
        char end = map ? '}' : ']';
        found.kind_ = map ? Json::kMap : Json::kList;
        if (Take(end)) return found;
        do {
          if (map) {
            Skip();
            found.names_.push_back(Text());
            if (!Take(':')) Bad();
          }
          found.items_.push_back(Value(depth + 1));
        } while (Take(','));
        if (!Take(end)) Bad();
        return found;
      }
      case '"':
        found.kind_ = Json::kText;
        found.text_ = Text();
        return found;
      case 't':
      case 'f':
        found.kind_ = Json::kFlag;
        found.flag_ = Peek() == 't';
        Word(found.flag_ ? "true" : "false");
        return found;
      case 'n':
        Word("null");
        return found;
      default:
        found.kind_ = Json::kNumber;
        found.number_ = Number();
        return found;
    }
  }

  double Number() {
    size_t from = at_;
    while (at_ < text_.size() && at_ - from < 64 &&
           std::string_view("+-.0123456789eE").find(Peek()) != text_.npos)
      ++at_;
    std::string part(text_.substr(from, at_ - from));
    char* end = nullptr;
    double found = std::strtod(part.c_str(), &end);
    if (part.empty() || *end != '\0' || !std::isfinite(found)) Bad();
    return found;
  }

  char32_t Hex() {
    char32_t found = 0;
    for (int each = 0; each < 4; ++each) {
      char digit = Peek();
      int value = digit >= '0' && digit <= '9'   ? digit - '0'
                  : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
                  : digit >= 'A' && digit <= 'F' ? digit - 'A' + 10
                                                 : -1;
      if (value < 0) Bad();
      found = found * 16 + static_cast<char32_t>(value);
      ++at_;
    }
    return found;
  }

  std::string Text() {
    if (Peek() != '"') Bad();
    std::string found;
    for (++at_; Peek() != '"' || at_ >= text_.size();) {
      if (at_ >= text_.size() || static_cast<unsigned char>(Peek()) < 0x20) Bad();
      if (Peek() != '\\') {
        found += text_[at_++];
        continue;
      }
      ++at_;
      char kind = Peek();
      ++at_;
      constexpr std::string_view kLetters = "bfnrt\"\\/", kMeant = "\b\f\n\r\t\"\\/";
      if (size_t place = kLetters.find(kind); kind != '\0' && place != kLetters.npos) {
        found += kMeant[place];
      } else if (kind == 'u') {
        char32_t point = Hex();
        if (point >= 0xD800 && point < 0xDC00 && text_.substr(at_, 2) == "\\u") {
          at_ += 2;
          char32_t low = Hex();
          if (low < 0xDC00 || low > 0xDFFF) Bad();
          point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
        }
        if (point >= 0xD800 && point < 0xE000) Bad();
        Append(found, point);
      } else {
        Bad();
      }
    }
    ++at_;
    for (size_t each = 0; each < found.size();) {
      int length = Character(std::string_view(found).substr(each));
      if (length <= 0) Bad();
      each += static_cast<size_t>(length);
    }
    return found;
  }

  std::string_view text_;
  const std::string& file_;
  size_t at_ = 0;
};

Json Json::Read(std::string_view text, const std::string& file) { return JsonReader(text, file).Whole(); }

void Json::Want(Kind kind, const char* name) const {
  constexpr const char* kNames[] = {"null", "a flag", "a number", "a text", "a list", "a map"};
  Require(kind_ == kind, JAXLLM_DAMAGED,
          std::string(name) + " is " + kNames[kind_] + ", not " + kNames[kind] + "; export the model again");
}

const std::string& Json::text(const char* name) const {
  Want(kText, name);
  return text_;
}

bool Json::flag(const char* name) const {
  Want(kFlag, name);
  return flag_;
}

double Json::number(const char* name) const {
  Want(kNumber, name);
  return number_;
}

int64_t Json::integer(const char* name, int64_t low, int64_t high) const {
  double found = number(name);
  Require(
      found == std::floor(found) && found >= static_cast<double>(low) && found <= static_cast<double>(high),
      JAXLLM_DAMAGED, std::string(name) + " is out of range; export the model again");
  return static_cast<int64_t>(found);
}

const std::vector<Json>& Json::list(const char* name) const {
  Want(kList, name);
  return items_;
}

const Json& Json::operator[](std::string_view name) const {
  static const Json kNone;
  for (size_t each = 0; each < names_.size(); ++each)
    if (names_[each] == name) return items_[each];
  return kNone;
}

}  // namespace jaxllm
