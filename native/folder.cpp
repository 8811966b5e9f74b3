#include "folder.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "checksum.h"
#include "system.h"

namespace jaxllm {
namespace {

constexpr int64_t kMostTokens = 1 << 20, kMostSignatures = 1 << 12, kManifestVersion = 1, kChatVersion = 1;
constexpr size_t kMostManifestBytes = 16 << 20, kMostTokenizerBytes = 64 << 20, kMostChatBytes = 1 << 20;
constexpr const char *kManifest = "program.json", *kTokenizer = "tokenizer.json", *kChat = "chat.json";

Manifest ReadManifest(const Json& file) {
  Manifest found;
  const Json& version = file["version"];
  Require(version.is(Json::kNumber) && version.number("version") == kManifestVersion, JAXLLM_DAMAGED,
          "program.json is of another version than this library reads; export the model again");
  const std::string& format = file["format"].text("format");
  Require(format == "tflite", JAXLLM_UNSUPPORTED,
          "the programs are " + format.substr(0, 40) + "; export the model with --format device");
  static const std::map<std::string, ElementType> kTypes = {
      {"float32", {1, 4}}, {"float16", {10, 2}}, {"int8", {9, 1}}};
  auto type = kTypes.find(file["cache_dtype"].text("cache_dtype"));
  Require(type != kTypes.end(), JAXLLM_UNSUPPORTED,
          "the caches are of another type than f32, f16 and int8; export the model with --format device");
  found.cache_type = type->second;
  found.name = file["name"].text("name");
  found.context_tokens = static_cast<int>(file["context_tokens"].integer("context_tokens", 1, kMostTokens));
  const Json& levels = file["levels"];
  Require(levels.is(Json::kMap), JAXLLM_DAMAGED, "levels is no map; export the model again");
  for (size_t each = 0; each < levels.items().size(); ++each) {
    const Json& cfg = levels.items()[each]["cfg"];
    Require(cfg.absent("encoder"), JAXLLM_UNSUPPORTED,
            "encoder-decoders are not supported by this library; run the folder by `python FOLDER`");
    int level = std::atoi(levels.names()[each].c_str());
    Require(level >= 1 && level <= kWhole, JAXLLM_DAMAGED, "a level is not 1 to 100; export the model again");
    found.vocab_sizes[level] = static_cast<int>(cfg["vocab_size"].integer("vocab_size", 1, kMostTokens));
  }
  Require(found.vocab_sizes.count(kWhole), JAXLLM_DAMAGED, "there is no whole model; export the model again");
  const std::vector<Json>& signatures = file["signatures"].list("signatures");
  Require(signatures.size() <= static_cast<size_t>(kMostSignatures), JAXLLM_DAMAGED,
          "there are too many signatures; export the model again");
  for (const Json& each : signatures) {
    const std::string& kind = each["kind"].text("kind");
    // Others are of blocks, codecs and the tiny LM.
    if (kind != "prefill" && kind != "decode" && kind != "verify") continue;
    int room = static_cast<int>(each["cache_tokens"].integer("cache_tokens", 0, found.context_tokens));
    int level = static_cast<int>(each["level"].integer("level", 1, kWhole));
    room = room ? room : found.context_tokens;
    int tokens = static_cast<int>(each["tokens"].integer("tokens", 1, room));
    Require(found.vocab_sizes.count(level), JAXLLM_DAMAGED,
            "a signature is of no level; export the model again");
    const std::string& name = each["file"].text("file");
    Require(found.model_file.empty() || found.model_file == name, JAXLLM_UNSUPPORTED,
            "the programs are in several models; export the model with --format device");
    found.model_file = name;
    found.signatures.push_back({kind, level, room, tokens});
  }
  if (file.absent("golden")) return found;
  for (const Json& each : file["golden"].list("golden")) {
    GoldenAnswer golden{static_cast<int>(each["level"].integer("level", 1, kWhole)), {}, {}};
    Require(found.vocab_sizes.count(golden.level) && found.golden.size() < kWhole, JAXLLM_DAMAGED,
            "a golden answer is of no level; export the model again");
    for (auto [name, to] : {std::pair("prompt", &golden.prompt), std::pair("tokens", &golden.tokens)}) {
      const std::vector<Json>& tokens = each[name].list(name);
      for (size_t at = 0; at < std::min<size_t>(tokens.size(), kMostTokens); ++at)
        to->push_back(static_cast<int32_t>(tokens[at].integer(name, 0, kMostTokens)));
      Require(!to->empty(), JAXLLM_DAMAGED, "a golden answer has no tokens; export the model again");
    }
    found.golden.push_back(std::move(golden));
  }
  return found;
}

int OpenRegular(const std::string& path) {
  int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  Require(descriptor >= 0, errno == ENOENT ? JAXLLM_DAMAGED : JAXLLM_SYSTEM,
          path + ": " + std::strerror(errno) + "; export with `jaxllm export --format device`");
  return descriptor;
}

}  // namespace

Mapped::Mapped(int descriptor, int64_t offset, int64_t bytes, const std::string& name) {
  struct stat facts;
  Require(fstat(descriptor, &facts) == 0, JAXLLM_SYSTEM, name + ": " + std::strerror(errno));
  Require(S_ISREG(facts.st_mode), JAXLLM_INVALID, name + " is no regular file; give one");
  Require(offset >= 0 && offset <= facts.st_size, JAXLLM_INVALID,
          name + ": the offset is outside of the file");
  if (bytes < 0) bytes = facts.st_size - offset;
  Require(bytes > 0 && bytes <= facts.st_size - offset, JAXLLM_DAMAGED,
          name + " is empty or truncated; copy the folder again");
  int64_t before = offset % sysconf(_SC_PAGESIZE);
  bytes_ = static_cast<size_t>(bytes);
  paged_ = bytes_ + static_cast<size_t>(before);
  pages_ =
      mmap(nullptr, paged_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor, offset - before);
  if (pages_ == MAP_FAILED) throw Failure(JAXLLM_SYSTEM, name + " cannot be mapped: " + std::strerror(errno));
  data_ = static_cast<char*>(pages_) + before;
}

Mapped::~Mapped() {
  if (pages_ && pages_ != MAP_FAILED) munmap(pages_, paged_);
}

void Mapped::GiveBack() const { madvise(pages_, paged_, MADV_DONTNEED); }

Folder::Folder(const std::string& path) {
  std::map<std::string, std::unique_ptr<Mapped>> files;
  auto add = [&](const std::string& name) {
    Descriptor file(OpenRegular(path + "/" + name));
    files[name] = std::make_unique<Mapped>(file.number(), 0, -1, path + "/" + name);
  };
  add(kManifest);
  add(kTokenizer);
  add("model.tflite");
  if (access((path + "/" + kChat).c_str(), F_OK) == 0) add(kChat);
  Read(files);
  model = std::move(files["model.tflite"]);
}

Folder::Folder(const jaxllm_file* given, size_t count) {
  std::map<std::string, std::unique_ptr<Mapped>> files;
  for (size_t each = 0; each < count; ++each) {
    Require(given[each].name != nullptr, JAXLLM_INVALID, "a file has no name; give those of the folder");
    std::string name = given[each].name;
    files[name] =
        std::make_unique<Mapped>(given[each].descriptor, given[each].offset, given[each].bytes, name);
  }
  Read(files);
  model = std::move(files["model.tflite"]);
}

void Folder::Read(const std::map<std::string, std::unique_ptr<Mapped>>& files) {
  auto bytes = [&](const std::string& name, size_t most) {
    auto found = files.find(name);
    Require(found != files.end(), JAXLLM_DAMAGED,
            "there is no " + name.substr(0, 80) + "; give all files of one export");
    std::string_view view = found->second->view();
    Require(view.size() <= most, JAXLLM_DAMAGED, name + " is too large; export the model again");
    return view;
  };
  Json all = Json::Read(bytes(kManifest, kMostManifestBytes), kManifest);
  manifest = ReadManifest(all);
  Require(manifest.model_file == "model.tflite", JAXLLM_UNSUPPORTED,
          "the programs are not in model.tflite; export the model with --format device");
  const Json& stored = all["files"];
  auto intact = [&](const std::string& name, size_t most) {
    std::string_view view = bytes(name, most);
    const Json& facts = stored[name];
    Require(facts.is(Json::kMap), JAXLLM_DAMAGED,
            "program.json does not list " + name + "; export the model again");
    const std::string& wanted = facts["xxh3_128"].text("xxh3_128");
    // Smaller files have no checksum here.
    bool same = facts["size_bytes"].number("size_bytes") == static_cast<double>(view.size());
    same = same && (view.size() < kLeastChecked || Checksum(view.data(), view.size()) == wanted);
    Require(same, JAXLLM_DAMAGED, name + " is damaged, or of another export; copy the folder again");
    return std::pair(view, wanted);
  };
  manifest.model_checksum = intact(manifest.model_file, SIZE_MAX).second;
  auto [tokens, checksum] = intact(kTokenizer, kMostTokenizerBytes);
  manifest.tokenizer_checksum = checksum;
  tokenizer = std::make_unique<Tokenizer>(tokens);
  if (files.count(kChat)) chat = ChatPieces(intact(kChat, kMostChatBytes).first);
}

ChatPieces::ChatPieces(std::string_view text) {
  Json file = Json::Read(text, kChat);
  Require(file["version"].integer("version", 0, kMostTokens) == kChatVersion, JAXLLM_DAMAGED,
          "chat.json is of another version than this library reads; export the model again");
  refused = file["refused"].text("refused");
  for (auto [name, to] : {std::pair("between", &between_), std::pair("end", &end_)}) {
    const Json& pieces = file[name];
    Require(pieces.is(Json::kMap), JAXLLM_DAMAGED, "chat.json has no pieces; export the model again");
    for (size_t each = 0; each < pieces.items().size(); ++each)
      (*to)[pieces.names()[each]] = pieces.items()[each].text("a piece of chat.json");
  }
  for (const Json& each : file["stripped"].list("stripped")) stripped_.push_back(each.text("a role"));
}

MarkedText ChatPieces::Render(const jaxllm_message* messages, size_t count) const {
  Require(refused.empty(), JAXLLM_UNSUPPORTED, refused);
  Require(messages && count, JAXLLM_INVALID, "a chat has no messages; give at least one");
  MarkedText found;
  std::string before;
  for (size_t each = 0; each < count; ++each) {
    const jaxllm_message& message = messages[each];
    Require(message.role && (message.content || !message.bytes), JAXLLM_INVALID,
            "a message has no role or content; give both");
    auto piece = between_.find(before + "|" + message.role);
    Require(piece != between_.end(), JAXLLM_INVALID,
            "the model's chat template has no message of '" + std::string(message.role).substr(0, 40) +
                (before.empty() ? "' at the beginning" : "' behind one of '" + before + "'") +
                "; order them otherwise");
    MarkedText content;
    content.Add({message.content ? message.content : "", message.bytes}, true);
    bool strips = std::count(stripped_.begin(), stripped_.end(), message.role);
    found.Add(piece->second, false);
    found.Add(strips ? Stripped(content.text) : content.text, true);
    before = message.role;
  }
  auto end = end_.find(before);
  Require(end != end_.end(), JAXLLM_INVALID,
          "no answer follows a message of '" + before + "'; end with a user's");
  found.Add(end->second, false);
  return found;
}

}  // namespace jaxllm
