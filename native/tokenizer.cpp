#include "tokenizer.h"

#include <algorithm>
#include <iterator>
#include <queue>
#include <tuple>

#include "unicode.inc"

namespace jaxllm {
namespace {

constexpr int64_t kMostTokens = 1 << 20;
constexpr size_t kMostAdded = 1 << 14;
// The regular expression of GPT-2's splits, which `ByteLevel` has, too.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// U+2581, SentencePiece's space; and the substitute for bytes that are no text.
constexpr std::string_view kSpace = "\xE2\x96\x81", kReplacement = "\xEF\xBF\xBD";

[[noreturn]] void Unsupported(const std::string& what) {
  throw Failure(JAXLLM_UNSUPPORTED,
                "tokenizer.json: " + what +
                    " is not supported by this library; run the folder "
                    "by `python FOLDER`, or use a model with a byte-level or Llama's tokenizer");
}

template <size_t N>
bool Among(const char32_t (&ranges)[N][2], char32_t point) {
  auto after = std::upper_bound(std::begin(ranges), std::end(ranges), point,
                                [](char32_t value, const char32_t (&range)[2]) { return value < range[0]; });
  return after != std::begin(ranges) && point <= (*std::prev(after))[1];
}

bool IsDigit(char32_t point) { return Among(kNumbers, point) != Among(kOtherDigits, point); }

struct Points {
  std::vector<char32_t> points;
  std::vector<size_t> starts;  // Of each in the text, and its end.
};

// Of a valid text.
Points PointsOf(std::string_view text) {
  Points found;
  for (size_t at = 0; at < text.size();) {
    int length = Character(text.substr(at));
    auto first = static_cast<unsigned char>(text[at]);
    char32_t point = length == 1 ? first : first & (0x7F >> length);
    for (int each = 1; each < length; ++each)
      point = point << 6 | (static_cast<unsigned char>(text[at + static_cast<size_t>(each)]) & 0x3F);
    found.points.push_back(point);
    found.starts.push_back(at);
    at += static_cast<size_t>(length);
  }
  found.starts.push_back(text.size());
  return found;
}

// The end of the match of GPT-2's expression at `at`.
size_t Gpt2Match(const std::vector<char32_t>& text, size_t at, size_t end) {
  auto letter = [](char32_t each) { return Among(kLetters, each); };
  auto number = [](char32_t each) { return Among(kNumbers, each); };
  auto space = [](char32_t each) { return Among(kSpaces, each); };
  auto other = [&](char32_t each) { return !letter(each) && !number(each) && !space(each); };
  auto run = [&](size_t from, auto& kind) {
    while (from < end && kind(text[from])) ++from;
    return from;
  };
  if (text[at] == '\'') {
    for (std::u32string_view each : {U"s", U"t", U"re", U"ve", U"m", U"ll", U"d"})
      if (end - at > each.size() &&
          std::equal(each.begin(), each.end(), text.begin() + static_cast<long>(at) + 1))
        return at + 1 + each.size();
  }
  size_t from = at + (text[at] == ' ');
  if (from < end) {
    if (letter(text[from])) return run(from, letter);
    if (number(text[from])) return run(from, number);
    if (other(text[from])) return run(from, other);
  }
  // Spaces, but for the last one before another character.
  size_t behind = run(at, space);
  return behind == end || behind - at == 1 ? behind : behind - 1;
}

// The byte that a letter of byte-level BPE stands for: printable ones stand for themselves, the others are
// letters from 256 up (Radford et al., Language models are unsupervised multitask learners, 2019); -1 for
// none.
int ByteOf(char32_t letter) {
  auto plain = [](int byte) { return (byte >= 0x21 && byte < 0x7F) || (byte >= 0xA1 && byte != 0xAD); };
  if (letter < 256) return plain(static_cast<int>(letter)) ? static_cast<int>(letter) : -1;
  auto place = static_cast<int>(letter) - 256;
  for (int byte = 0; byte < 256; ++byte)
    if (!plain(byte) && place-- == 0) return byte;
  return -1;
}

// The value of a name like <0x0A>; -1 for another.
int NamedByte(const std::string& name) {
  auto digit = [](char each) {
    return each >= '0' && each <= '9' ? each - '0' : each >= 'A' && each <= 'F' ? each - 'A' + 10 : -1;
  };
  if (name.size() != 6 || name.compare(0, 3, "<0x") != 0 || name[5] != '>') return -1;
  int high = digit(name[3]), low = digit(name[4]);
  return high < 0 || low < 0 ? -1 : 16 * high + low;
}

std::string Replaced(std::string_view text, std::string_view old, std::string_view by) {
  std::string found;
  for (size_t at = 0;;) {
    size_t next = text.find(old, at);
    found += text.substr(at, next - at);
    if (next == text.npos) return found;
    found += by;
    at = next + old.size();
  }
}

std::string TypeOf(const Json& part) { return part.is(Json::kNull) ? "null" : part["type"].text("a type"); }

}  // namespace

void MarkedText::Add(std::string_view part, bool is_content) {
  for (size_t at = 0; at < part.size();) {
    int length = Character(part.substr(at));
    if (length > 0)
      text += part.substr(at, static_cast<size_t>(length));
    else
      text += kReplacement;
    at += length ? static_cast<size_t>(std::abs(length)) : part.size() - at;
  }
  content.resize(text.size(), is_content);
}

std::string_view Stripped(std::string_view text) {
  Points all = PointsOf(text);
  auto space = [](char32_t each) { return Among(kSpaces, each) || (each >= 0x1C && each <= 0x1F); };
  size_t first = 0, end = all.points.size();
  while (first < end && space(all.points[first])) ++first;
  while (end > first && space(all.points[end - 1])) --end;
  return text.substr(all.starts[first], all.starts[end] - all.starts[first]);
}

Tokenizer::Tokenizer(std::string_view file) {
  Json files = Json::Read(file, "tokenizer.json");
  std::string text = files["tokenizer_json"].text("tokenizer_json");
  for (const Json& each : files["eos_ids"].list("eos_ids"))
    ends_.push_back(static_cast<int32_t>(each.integer("an id of eos_ids", 0, kMostTokens)));
  Json library = Json::Read(text, "tokenizer.json");
  std::fill(std::begin(byte_ids_), std::end(byte_ids_), -1);
  ReadNormalizer(library["normalizer"]);
  ReadSplits(library["pre_tokenizer"]);
  ReadDecoder(library["decoder"]);
  ReadModel(library["model"]);
  ReadAdded(files, library);
  ReadAround(library["post_processor"]);
}

void Tokenizer::ReadNormalizer(const Json& part) {
  if (part.is(Json::kNull)) return;
  // Llama 2's: a space in front of each text, and U+2581 for spaces.
  const Json& steps = part["normalizers"];
  bool known = TypeOf(part) == "Sequence" && steps.is(Json::kList) && steps.items().size() == 2;
  known = known && TypeOf(steps.items()[0]) == "Prepend" && TypeOf(steps.items()[1]) == "Replace";
  if (!known) Unsupported("the normalizer " + TypeOf(part));
  const Json &prepend = steps.items()[0]["prepend"], &from = steps.items()[1]["pattern"]["String"];
  known = prepend.is(Json::kText) && prepend.text("prepend") == kSpace && from.is(Json::kText) &&
          from.text("pattern") == " " && steps.items()[1]["content"].text("content") == kSpace;
  if (!known) Unsupported("a normalizer of other spaces than Llama's");
  bytes_ = false;
}

void Tokenizer::ReadSplits(const Json& part) {
  std::string type = TypeOf(part);
  if (!bytes_) {
    if (type != "null") Unsupported("the pre-tokenizer " + type + " behind a normalizer");
    return;
  }
  const std::vector<Json> alone = {part};
  bool mapped = false;
  for (const Json& each : type == "Sequence" ? part["pretokenizers"].list("pretokenizers") : alone) {
    std::string kind = TypeOf(each);
    if (mapped) Unsupported("the pre-tokenizer " + kind + " behind ByteLevel");
    if (kind == "Digits") {
      if (!each["individual_digits"].flag("individual_digits")) Unsupported("Digits of whole numbers");
      splits_.push_back(Split::kDigits);
    } else if (kind == "Split") {
      const Json& pattern = each["pattern"]["Regex"];
      bool known = pattern.is(Json::kText) && pattern.text("pattern") == kGpt2Pattern;
      if (!known || each["behavior"].text("behavior") != "Isolated" || each["invert"].flag("invert"))
        Unsupported("a Split of another expression than GPT-2's");
      splits_.push_back(Split::kGpt2);
    } else if (kind == "ByteLevel") {
      if (each["add_prefix_space"].flag("add_prefix_space")) Unsupported("ByteLevel with add_prefix_space");
      if (each.absent("use_regex") || each["use_regex"].flag("use_regex")) splits_.push_back(Split::kGpt2);
      mapped = true;
    } else {
      Unsupported("the pre-tokenizer " + kind);
    }
  }
  if (!mapped) Unsupported("a pre-tokenizer without ByteLevel");
}

void Tokenizer::ReadDecoder(const Json& part) const {
  std::string type = TypeOf(part);
  if (bytes_) {
    if (type != "ByteLevel") Unsupported("the decoder " + type);
    return;
  }
  constexpr const char* kSteps[] = {"Replace", "ByteFallback", "Fuse", "Strip"};
  const Json& steps = part["decoders"];
  bool known = type == "Sequence" && steps.is(Json::kList) && steps.items().size() == 4;
  for (size_t each = 0; known && each < 4; ++each) known = TypeOf(steps.items()[each]) == kSteps[each];
  if (!known) Unsupported("the decoder " + type);
  const Json& strip = steps.items()[3];
  known = strip["content"].text("content") == " " && strip["start"].number("start") == 1 &&
          strip["stop"].number("stop") == 0;
  if (!known) Unsupported("a decoder that strips otherwise than Llama's");
}

void Tokenizer::AddText(int32_t id, const std::string& name) {
  auto place = static_cast<size_t>(id);
  if (place >= texts_.size()) {
    texts_.resize(place + 1);
    kinds_.resize(place + 1, kNoText);
  }
  std::string text;
  kinds_[place] = kText;
  if (bytes_) {
    for (char32_t point : PointsOf(name).points) {
      int byte = ByteOf(point);
      if (byte < 0) {
        text = name;
        break;
      }
      text += static_cast<char>(byte);
    }
  } else if (int byte = NamedByte(name); byte >= 0) {
    text = static_cast<char>(byte);
    kinds_[place] = kByte;
  } else {
    text = Replaced(name, kSpace, " ");
  }
  texts_[place] = std::move(text);
}

void Tokenizer::ReadModel(const Json& model) {
  if (TypeOf(model) != "BPE") Unsupported("the model " + TypeOf(model));
  for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json& value = model[name];
    bool none = value.is(Json::kNull) || (value.is(Json::kText) && value.text(name).empty());
    if (!none) Unsupported(std::string("BPE with ") + name);
  }
  auto flag = [&](const char* name) { return !model.absent(name) && model[name].flag(name); };
  if (flag("ignore_merges")) Unsupported("BPE with ignore_merges");
  if (flag("byte_fallback") == bytes_)
    Unsupported(bytes_ ? "byte_fallback of byte-level BPE" : "BPE without byte_fallback");
  const Json& vocab = model["vocab"];
  Require(vocab.is(Json::kMap) && vocab.items().size() <= static_cast<size_t>(kMostTokens), JAXLLM_DAMAGED,
          "tokenizer.json: the vocabulary is no map of at most 1,048,576 tokens; export the model again");
  std::unordered_map<std::string, int32_t> names;
  for (size_t each = 0; each < vocab.items().size(); ++each) {
    const std::string& name = vocab.names()[each];
    auto id = static_cast<int32_t>(vocab.items()[each].integer("a token's id", 0, kMostTokens - 1));
    names[name] = id;
    AddText(id, name);
    if (bytes_) {
      Points letter = PointsOf(name);
      int byte = letter.points.size() == 1 ? ByteOf(letter.points[0]) : -1;
      if (byte >= 0) byte_ids_[byte] = id;
    } else if (int byte = NamedByte(name); byte >= 0) {
      byte_ids_[byte] = id;
    }
  }
  if (!bytes_) {
    for (const auto& [name, id] : names)
      if (PointsOf(name).points.size() == 1) letters_[name] = id;
    for (int32_t id : byte_ids_)
      if (id < 0) Unsupported("byte_fallback without all bytes");
  }
  const std::vector<Json>& merges = model["merges"].list("merges");
  merges_.reserve(merges.size());
  auto id_of = [&](const std::string& name) {
    auto found = names.find(name);
    Require(found != names.end(), JAXLLM_DAMAGED,
            "tokenizer.json: a merge names a token that the vocabulary lacks; export the model again");
    return found->second;
  };
  for (const Json& each : merges) {
    std::string left, right;
    if (each.is(Json::kText)) {
      const std::string& both = each.text("a merge");
      size_t middle = both.find(' ');
      Require(middle != both.npos, JAXLLM_DAMAGED,
              "tokenizer.json: a merge is no pair; export the model again");
      left = both.substr(0, middle), right = both.substr(middle + 1);
    } else {
      Require(each.list("a merge").size() == 2, JAXLLM_DAMAGED,
              "tokenizer.json: a merge is no pair; export the model again");
      left = each.items()[0].text("a merge"), right = each.items()[1].text("a merge");
    }
    uint64_t pair = static_cast<uint64_t>(id_of(left)) << 32 | static_cast<uint32_t>(id_of(right));
    merges_.push_back({pair, static_cast<int32_t>(merges_.size()), id_of(left + right)});
  }
  // Of a pair that is named twice the later rank counts, as in the library's map.
  std::sort(merges_.begin(), merges_.end(), [](const Merge& a, const Merge& b) {
    return std::tie(a.pair, b.rank) < std::tie(b.pair, a.rank);
  });
}

void Tokenizer::ReadAdded(const Json& file, const Json& library) {
  const std::vector<Json>& tokens = library["added_tokens"].list("added_tokens");
  Require(tokens.size() <= kMostAdded, JAXLLM_DAMAGED,
          "tokenizer.json: too many added tokens; export the model again");
  const Json& named = file["special"];
  std::unordered_map<int32_t, std::string> controls;
  for (const Json& each : tokens) {
    const std::string& content = each["content"].text("content");
    auto id = static_cast<int32_t>(each["id"].integer("id", 0, kMostTokens - 1));
    for (const char* name : {"single_word", "lstrip", "rstrip"})
      if (each[name].flag(name)) Unsupported("the added token '" + content.substr(0, 40) + "' with " + name);
    bool special = each["special"].flag("special"), control = special;
    control = control || std::count(ends_.begin(), ends_.end(), id);
    for (const Json& other : named.items())
      control = control || (other.is(Json::kText) && other.text("special") == content);
    bool normalized = each["normalized"].flag("normalized");
    if (normalized && !bytes_) Unsupported("the normalized added token '" + content.substr(0, 40) + "'");
    AddText(id, content);
    if (special) kinds_[static_cast<size_t>(id)] = kNoText;
    if (content.empty()) continue;
    if (control) controls[id] = content;
    added_[normalized][static_cast<unsigned char>(content[0])].push_back({content, id, control});
  }
  for (const Merge& merge : merges_)
    if (auto found = controls.find(merge.made); found != controls.end())
      Unsupported("a merge into the special token '" + found->second.substr(0, 40) + "'");
  for (auto& list : added_)
    for (auto& tokens_of : list)
      std::stable_sort(tokens_of.begin(), tokens_of.end(),
                       [](const Added& a, const Added& b) { return a.content.size() > b.content.size(); });
}

void Tokenizer::ReadAround(const Json& part) {
  std::string type = TypeOf(part);
  if (type == "null" || type == "ByteLevel") return;
  if (type != "TemplateProcessing") Unsupported("the post-processor " + type);
  bool behind = false;
  for (const Json& each : part["single"].list("single")) {
    if (!each.absent("Sequence")) {
      behind = true;
      continue;
    }
    const Json& token = part["special_tokens"][each["SpecialToken"]["id"].text("a special token")];
    for (const Json& id : token["ids"].list("ids of a special token"))
      (behind ? after_ : before_).push_back(static_cast<int32_t>(id.integer("an id", 0, kMostTokens - 1)));
  }
}

std::vector<int32_t> Tokenizer::Encode(const MarkedText& text, bool around) const {
  std::vector<int32_t> found;
  if (around) found = before_;
  EncodePart(text, 0, text.text.size(), 0, found);
  if (around) found.insert(found.end(), after_.begin(), after_.end());
  return found;
}

void Tokenizer::EncodePart(const MarkedText& text, size_t from, size_t to, size_t list,
                           std::vector<int32_t>& out) const {
  if (list == 2) return EncodeSection(std::string_view(text.text).substr(from, to - from), out);
  for (size_t at = from; at < to;) {
    const Added* found = nullptr;
    for (const Added& each : added_[list][static_cast<unsigned char>(text.text[at])]) {
      size_t size = each.content.size();
      if (size > to - at || text.text.compare(at, size, each.content) != 0) continue;
      auto begin = text.content.begin() + static_cast<long>(at);
      if (each.control &&
          std::find(begin, begin + static_cast<long>(size), true) != begin + static_cast<long>(size))
        continue;
      found = &each;
      break;
    }
    if (!found) {
      ++at;
      continue;
    }
    EncodePart(text, from, at, list + 1, out);
    out.push_back(found->id);
    from = at = at + found->content.size();
  }
  if (from < to) EncodePart(text, from, to, list + 1, out);
}

void Tokenizer::EncodeSection(std::string_view section, std::vector<int32_t>& out) const {
  if (section.empty()) return;
  if (!bytes_) return EncodePiece(std::string(kSpace) + Replaced(section, " ", kSpace), out);
  Points all = PointsOf(section);
  std::vector<size_t> ends = {all.points.size()};
  for (Split split : splits_) {
    std::vector<size_t> cut;
    size_t at = 0;
    for (size_t end : ends) {
      while (at < end) {
        size_t next = at;
        if (split == Split::kGpt2)
          next = Gpt2Match(all.points, at, end);
        else if (IsDigit(all.points[at]))
          ++next;
        else
          while (next < end && !IsDigit(all.points[next])) ++next;
        cut.push_back(next);
        at = next;
      }
    }
    ends = std::move(cut);
  }
  size_t at = 0;
  for (size_t end : ends) {
    size_t first = all.starts[at];
    EncodePiece(section.substr(first, all.starts[end] - first), out);
    at = end;
  }
}

const Tokenizer::Merge* Tokenizer::Find(int32_t left, int32_t right) const {
  uint64_t pair = static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  auto found = std::lower_bound(merges_.begin(), merges_.end(), pair,
                                [](const Merge& merge, uint64_t value) { return merge.pair < value; });
  return found != merges_.end() && found->pair == pair ? &*found : nullptr;
}

void Tokenizer::EncodePiece(std::string_view piece, std::vector<int32_t>& out) const {
  std::vector<Symbol> symbols;
  auto add = [&](int32_t id) {
    auto place = static_cast<int32_t>(symbols.size());
    symbols.push_back({id, place - 1, place + 1});
  };
  if (bytes_) {
    for (char each : piece)
      if (int32_t id = byte_ids_[static_cast<unsigned char>(each)]; id >= 0) add(id);
  } else {
    Points all = PointsOf(piece);
    for (size_t each = 0; each < all.points.size(); ++each) {
      std::string letter(piece.substr(all.starts[each], all.starts[each + 1] - all.starts[each]));
      auto found = letters_.find(letter);
      if (found != letters_.end())
        add(found->second);
      else
        for (char byte : letter) add(byte_ids_[static_cast<unsigned char>(byte)]);
    }
  }
  if (symbols.empty()) return;
  symbols.back().after = -1;
  // Pairs by rank, then by place; those of symbols that merged meanwhile are skipped.
  using Entry = std::tuple<int32_t, int32_t, int32_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> waiting;
  auto at = [&](int32_t place) -> Symbol& { return symbols[static_cast<size_t>(place)]; };
  auto offer = [&](int32_t place) {
    if (place < 0 || at(place).after < 0) return;
    if (const Merge* merge = Find(at(place).id, at(at(place).after).id))
      waiting.emplace(merge->rank, place, merge->made);
  };
  for (size_t each = 0; each < symbols.size(); ++each) offer(static_cast<int32_t>(each));
  while (!waiting.empty()) {
    auto [rank, place, made] = waiting.top();
    waiting.pop();
    Symbol& left = at(place);
    if (left.id < 0 || left.after < 0) continue;
    const Merge* merge = Find(left.id, at(left.after).id);
    if (!merge || merge->made != made) continue;
    Symbol& right = at(left.after);
    left.id = made;
    left.after = right.after;
    right.id = -1;
    if (left.after >= 0) at(left.after).before = place;
    offer(left.before);
    offer(place);
  }
  for (const Symbol& each : symbols)
    if (each.id >= 0) out.push_back(each.id);
}

std::string Detokenizer::Push(int32_t token) {
  auto place = static_cast<size_t>(token);
  if (token < 0 || place >= tokenizer_.texts_.size() || tokenizer_.kinds_[place] == Tokenizer::kNoText)
    return "";
  const std::string& text = tokenizer_.texts_[place];
  if (tokenizer_.bytes_ || tokenizer_.kinds_[place] == Tokenizer::kByte) {
    open_ += text;
    return Taken(false);
  }
  return Taken(true) +
         (begun_ || text.empty() || text[0] != ' ' ? (begun_ = true, text) : (begun_ = true, text.substr(1)));
}

std::string Detokenizer::Flush() {
  std::string found = Taken(true);
  begun_ = false;
  return found;
}

std::string Detokenizer::Taken(bool whole) {
  std::string found;
  size_t at = 0;
  while (at < open_.size()) {
    int length = Character(std::string_view(open_).substr(at));
    if (!length && !whole) break;
    if (length > 0) {
      found += open_.substr(at, static_cast<size_t>(length));
      at += static_cast<size_t>(length);
      continue;
    }
    size_t bad = length ? static_cast<size_t>(-length) : open_.size() - at;
    // SentencePiece's decoder has a substitute for each byte.
    for (size_t each = 0; each < (tokenizer_.bytes_ ? 1 : bad); ++each) found += kReplacement;
    at += bad;
  }
  open_.erase(0, at);
  if (!tokenizer_.bytes_ && !found.empty() && !std::exchange(begun_, true) && found[0] == ' ')
    found.erase(0, 1);
  return found;
}

std::string StopFinder::Push(const std::string& text) {
  if (stopped_) return "";
  std::string all = std::exchange(withheld_, {}) + text;
  size_t best_end = all.npos, best_start = 0, held = 0;
  for (const std::string& stop : stops_) {
    size_t start = all.find(stop);
    if (start != all.npos && std::tuple(start + stop.size(), start) < std::tuple(best_end, best_start)) {
      best_end = start + stop.size();
      best_start = start;
    }
    for (size_t length = std::min(stop.size() - 1, all.size()); length > held; --length)
      if (all.compare(all.size() - length, length, stop, 0, length) == 0) held = length;
  }
  if (best_end != all.npos) {
    stopped_ = true;
    return all.substr(0, best_start);
  }
  withheld_ = all.substr(all.size() - held);
  all.resize(all.size() - held);
  return all;
}

}  // namespace jaxllm
