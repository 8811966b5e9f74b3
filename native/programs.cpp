#include "programs.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace jaxllm {
namespace {

constexpr int kCpu = 1, kReading = 0, kWriting = 1;
// What each chunk costs besides its tokens: it reads all weights.
constexpr int kPassTokens = 24;
constexpr int kPadding = -1;
// The longest chunk over the shortest: planning takes time and memory by it.
constexpr int kMostSpread = 64;

void Check(LiteRtStatus status, const std::string& what) {
  Require(status == 0, JAXLLM_RUNTIME,
          "LiteRT refuses to " + what + " (status " + std::to_string(status) + ")");
}

std::string NameOf(const Signature& each, int context) {
  std::string name = each.level == kWhole ? "" : "level_" + std::to_string(each.level) + "_";
  if (each.room != context) name += "cache_" + std::to_string(each.room) + "_";
  return name + each.kind + (each.kind == "decode" ? "" : "_" + std::to_string(each.tokens));
}

bool IsCache(const std::string& name) { return name.rfind("kv_cache_", 0) == 0; }

class Locked {
 public:
  Locked(Handle handle, int mode) : handle_(handle) {
    Check(LiteRtLockTensorBuffer(handle, &address_, mode), "lock a buffer");
  }
  ~Locked() { LiteRtUnlockTensorBuffer(handle_); }
  void* address() const { return address_; }

 private:
  Handle handle_;
  void* address_ = nullptr;
};

// The costs of the cheapest lengths, each at most the one before: the first of equal ones, from short to
// long.
std::vector<int> Cheapest(int tokens, const std::vector<int>& lengths, size_t count,
                          std::map<std::pair<int, size_t>, std::vector<int>>& known) {
  auto& found = known[{tokens, count}];
  if (!found.empty()) return found;
  int best = 0;
  for (size_t place = 0; place < count; ++place) {
    std::vector<int> plan = {lengths[place]};
    if (tokens > lengths[place]) {
      std::vector<int> rest = Cheapest(tokens - lengths[place], lengths, place + 1, known);
      plan.insert(plan.end(), rest.begin(), rest.end());
    }
    int cost = kPassTokens * static_cast<int>(plan.size());
    for (int each : plan) cost += each;
    if (found.empty() || cost < best) best = cost, found = std::move(plan);
  }
  return found;
}

// Fields of tables in LiteRT's schema: of a model, of a signature; and a subgraph's tensors, inputs, outputs
// and operators.
constexpr size_t kSubgraphs = 2, kSignatures = 7, kKey = 2, kSubgraph = 4, kLists = 4;

// A flatbuffer, whose tables are at offsets; 0 is an absent one.
class Tables {
 public:
  Tables(char* data, size_t bytes) : data_(data), bytes_(bytes) {
    Require(reinterpret_cast<uintptr_t>(data) % 4 == 0, JAXLLM_INVALID,
            "model.tflite begins at an offset that is no multiple of 4; align it");
  }

  template <typename Number = uint32_t>
  Number& At(size_t place) const {
    Require(place < bytes_ && sizeof(Number) <= bytes_ - place && place % sizeof(Number) == 0, JAXLLM_DAMAGED,
            "model.tflite is damaged; export the model again");
    return *reinterpret_cast<Number*>(data_ + place);
  }
  // The place of a field, and of the vector or string that it refers to.
  size_t Field(size_t table, size_t index) const {
    size_t facts = table - static_cast<size_t>(At<int32_t>(table)), at = 4 + 2 * index;
    uint16_t offset = at < At<uint16_t>(facts) ? At<uint16_t>(facts + at) : 0;
    return offset ? table + offset : 0;
  }
  size_t List(size_t table, size_t index) const {
    size_t field = Field(table, index);
    return field ? field + At(field) : 0;
  }
  std::vector<size_t> Members(size_t vector) const {
    std::vector<size_t> found;
    for (size_t each = vector + 4, end = each + 4 * size_t{At(vector)}; each < end; each += 4)
      found.push_back(each + At(each));
    return found;
  }

 private:
  char* data_;
  size_t bytes_;
};

// Empties the subgraphs of a model's file that none of the signatures `names` runs, and removes the other
// signatures, in place.
void KeepPrograms(Mapped& file, const std::set<std::string>& names) {
  Tables tables(file.data(), file.view().size());
  size_t root = tables.At(0), list = tables.List(root, kSignatures);
  std::vector<size_t> subgraphs = tables.Members(tables.List(root, kSubgraphs)), kept;
  std::set<size_t> used, unused;
  for (size_t each : tables.Members(list)) {
    // Absent, it is the first.
    size_t field = tables.Field(each, kSubgraph), subgraph = field ? tables.At(field) : 0;
    Require(subgraph < subgraphs.size(), JAXLLM_DAMAGED, "model.tflite is damaged; export the model again");
    size_t key = tables.List(each, kKey);
    bool wanted = names.count(std::string(file.view().substr(key + 4, tables.At(key)))) > 0;
    (wanted ? used : unused).insert(subgraph);
    if (wanted) kept.push_back(each);
  }
  for (size_t each : unused)
    for (size_t index = 0; index < kLists && !used.count(each); ++index)
      if (size_t place = tables.List(subgraphs[each], index)) tables.At(place) = 0;
  tables.At(list) = static_cast<uint32_t>(kept.size());
  for (size_t index = 0, slot = list + 4; index < kept.size(); ++index, slot += 4)
    tables.At(slot) = static_cast<uint32_t>(kept[index] - slot);
}

}  // namespace

void Buffer::Read(const std::function<void(const void*)>& use) const {
  use(Locked(handle_, kReading).address());
}
void Buffer::Write(const std::function<void(void*)>& use) { use(Locked(handle_, kWriting).address()); }
size_t Buffer::bytes() const {
  size_t found = 0;
  Check(LiteRtGetTensorBufferPackedSize(handle_, &found), "measure a buffer");
  return found;
}

Programs::Programs(const Folder& folder, int threads)
    : manifest_(folder.manifest), file_(*folder.model), threads_(threads) {
  try {
    Check(LiteRtCreateEnvironment(0, nullptr, &environment_), "start");
    Check(LiteRtCreateModelFromBuffer(environment_, file_.data(), file_.view().size(), &model_),
          "open model.tflite");
    auto there = Listed();
    for (const Signature& each : manifest_.signatures) {
      auto found = there.find(NameOf(each, manifest_.context_tokens));
      Require(found != there.end(), JAXLLM_DAMAGED,
              "model.tflite lacks the signature " + NameOf(each, manifest_.context_tokens) +
                  ", which program.json names; copy both from one export");
      Add(found->second.second, each, manifest_.vocab_sizes.at(each.level));
    }
    // Programs are opened when they first run.
    LiteRtDestroyModel(std::exchange(model_, nullptr));
    for (const auto& [level, vocab] : manifest_.vocab_sizes) {
      for (int room : Rooms(level)) {
        std::vector<int> chunks = Sizes("prefill", level, room);
        Require(
            programs_.count({"decode", level, room, 1}) && !chunks.empty(), JAXLLM_DAMAGED,
            "level " + std::to_string(level) + " cannot read a prompt and decode; export the model again");
        Require(
            chunks.back() <= kMostSpread * chunks.front(), JAXLLM_UNSUPPORTED,
            "the chunks of prompts differ too much in length; export the model with closer --chunk-tokens");
      }
    }
    Require(!Rooms(kWhole).empty(), JAXLLM_DAMAGED,
            "the whole model has no programs; export the model again");
  } catch (...) {
    Release();
    throw;
  }
}

Programs::~Programs() { Release(); }

void Programs::Release() {
  programs_.clear();
  if (compiled_) LiteRtDestroyCompiledModel(std::exchange(compiled_, nullptr));
  if (model_) LiteRtDestroyModel(std::exchange(model_, nullptr));
  if (environment_) LiteRtDestroyEnvironment(std::exchange(environment_, nullptr));
}

std::map<std::string, std::pair<size_t, Handle>> Programs::Listed() const {
  size_t count = 0;
  Check(LiteRtGetNumModelSignatures(model_, &count), "list signatures");
  std::map<std::string, std::pair<size_t, Handle>> found;
  for (size_t index = 0; index < count; ++index) {
    Handle signature = nullptr;
    const char* key = nullptr;
    Check(LiteRtGetModelSignature(model_, index, &signature), "give a signature");
    Check(LiteRtGetSignatureKey(signature, &key), "name a signature");
    found[key] = {index, signature};
  }
  return found;
}

void Programs::Compile() {
  // Before others take memory: all have the same weights and intermediate results.
  if (compiled_) LiteRtDestroyCompiledModel(std::exchange(compiled_, nullptr));
  if (model_) LiteRtDestroyModel(std::exchange(model_, nullptr));
  file_.GiveBack();
  KeepPrograms(file_, open_);
  Check(LiteRtCreateModelFromBuffer(environment_, file_.data(), file_.view().size(), &model_),
        "open model.tflite");
  Handle options = nullptr, cpu = nullptr;
  Check(LiteRtCreateOptions(&options), "take options");
  LiteRtStatus status = LiteRtSetOptionsHardwareAccelerators(options, kCpu);
  if (!status) {
    // Else each program packs the weights for itself.
    std::string facts = "weight_cache_file_path = \":memory\"\n";
    if (threads_) facts += "num_threads = " + std::to_string(threads_) + "\n";
    status = LiteRtCreateOpaqueOptions("xnnpack", strdup(facts.c_str()), std::free, &cpu);
    if (!status) status = LiteRtAddOpaqueOptions(options, cpu);
  }
  if (!status) status = LiteRtCreateCompiledModel(environment_, model_, options, &compiled_);
  LiteRtDestroyOptions(options);
  Check(status, "compile model.tflite");
  // The packed weights are a copy. The model's list stays as it was opened.
  file_.GiveBack();
  KeepPrograms(file_, open_);
  auto there = Listed();
  for (auto& [key, program] : programs_)
    if (open_.count(program.name)) program.index = there.at(program.name).first;
}

void Programs::Add(Handle handle, const Signature& signature, int vocab) {
  Program program;
  program.name = NameOf(signature, manifest_.context_tokens);
  program.kind = signature.kind;
  program.level = signature.level;
  program.room = signature.room;
  program.tokens = signature.tokens;
  auto& shapes = shapes_[signature.level];
  int64_t tokens = signature.tokens;
  size_t caches[2] = {}, known = 0;
  for (bool input : {true, false}) {
    size_t count = 0;
    Check((input ? LiteRtGetNumSignatureInputs : LiteRtGetNumSignatureOutputs)(handle, &count),
          "count tensors");
    for (size_t each = 0; each < count; ++each) {
      const char* given = nullptr;
      Check((input ? LiteRtGetSignatureInputName : LiteRtGetSignatureOutputName)(handle, each, &given),
            "name a tensor");
      std::string tensor_name = given;
      Handle tensor = nullptr;
      TensorType type;
      Check((input ? LiteRtGetSignatureInputTensorByIndex : LiteRtGetSignatureOutputTensorByIndex)(
                handle, each, &tensor),
            "give a tensor");
      Check(LiteRtGetRankedTensorType(tensor, &type), "tell a tensor's shape");
      (input ? program.inputs : program.outputs).push_back({tensor_name, type});
      int rank = static_cast<int>(type.rank_and_strides & 0x7F);
      int64_t size = 1;
      for (int axis = 0; axis < rank && axis < 8; ++axis)
        size *= std::clamp(type.dimensions[axis], 0, 1 << 20);
      bool fits = false;
      if (IsCache(tensor_name)) {
        int width = std::clamp(type.dimensions[3], 0, 1 << 20);
        CacheShape shape = {type.dimensions[1], manifest_.cache_type.bytes * static_cast<size_t>(width)};
        CacheShape& first = shapes.try_emplace(tensor_name, shape).first->second;
        fits = rank == 4 && type.dimensions[2] == signature.room && shape.heads > 0 && width > 0 &&
               type.element == manifest_.cache_type.number && first.heads == shape.heads &&
               first.row_bytes == shape.row_bytes;
        caches[input] += fits;
      } else if (tensor_name == "adapter") {
        fits = input;
      } else {
        fits = input ? size == (tensor_name == "mask" ? tokens * tokens : tokens) : size == tokens * vocab;
        bool named = input ? tensor_name == "tokens" || tensor_name == "input_pos" ||
                                 (tensor_name == "mask" && program.kind == "verify")
                           : tensor_name == "logits";
        fits = fits && named;
        known += named;
      }
      Require(fits, JAXLLM_DAMAGED,
              program.name + " in model.tflite has an array " + tensor_name.substr(0, 80) +
                  " of another shape than program.json says; copy both from one export");
    }
  }
  size_t wanted = program.kind == "prefill" ? 2 : program.kind == "decode" ? 3 : 4;
  Require(known == wanted && caches[0] == caches[1] && caches[0] == shapes.size(), JAXLLM_DAMAGED,
          program.name + " in model.tflite lacks an array; export the model again");
  programs_.emplace(Key(program.kind, program.level, program.room, program.tokens), std::move(program));
}

std::vector<int> Programs::Levels() const {
  std::vector<int> found;
  for (const auto& [level, shapes] : shapes_) found.push_back(level);
  return found;
}

std::vector<int> Programs::Rooms(int level) const {
  std::vector<int> found;
  for (const auto& [key, program] : programs_)
    if (program.level == level) found.push_back(program.room);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

std::vector<int> Programs::Sizes(const std::string& kind, int level, int room) const {
  std::vector<int> found;
  for (const auto& [key, program] : programs_)
    if (program.kind == kind && program.level == level && program.room == room)
      found.push_back(program.tokens);
  std::sort(found.begin(), found.end());
  return found;
}

Programs::Program& Programs::Opened(const std::string& kind, int level, int room, int tokens) {
  auto found = programs_.find({kind, level, room, tokens});
  Require(found != programs_.end(), JAXLLM_UNSUPPORTED,
          "level " + std::to_string(level) + " was not exported; export the model with --level " +
              std::to_string(level));
  if (compiled_ && open_.count(found->second.name)) return found->second;
  bool drafts = kind == "verify";
  for (const auto& [key, program] : programs_)
    if (program.level == level && program.room == room && (program.kind == "verify") == drafts)
      open_.insert(program.name);
  Compile();
  return found->second;
}

std::unique_ptr<Buffer> Programs::MadeBuffer(const Program& program, bool input, size_t index) {
  Handle needs = nullptr, buffer = nullptr;
  Check((input ? LiteRtGetCompiledModelInputBufferRequirements
               : LiteRtGetCompiledModelOutputBufferRequirements)(compiled_, program.index, index, &needs),
        "tell what a buffer needs");
  const TensorType& type = (input ? program.inputs : program.outputs)[index].type;
  Check(LiteRtCreateManagedTensorBufferFromRequirements(environment_, &type, needs, &buffer),
        "make a buffer");
  auto found = std::make_unique<Buffer>(buffer);
  // Masked positions are multiplied by zero: they must be finite. And zeros are no adapter.
  size_t bytes = found->bytes();
  found->Write([&](void* to) { std::memset(to, 0, bytes); });
  return found;
}

std::vector<Handle> Programs::Arguments(Program& program, bool input, Buffers& caches) {
  std::vector<Handle> found;
  const std::vector<Tensor>& tensors = input ? program.inputs : program.outputs;
  for (size_t index = 0; index < tensors.size(); ++index) {
    const std::string& name = tensors[index].name;
    auto& buffer = (IsCache(name) ? caches : input ? program.in : program.out)[name];
    if (!buffer) buffer = MadeBuffer(program, input, index);
    found.push_back(buffer->handle());
  }
  return found;
}

Caches Programs::Made(int level, int room) {
  std::lock_guard<std::mutex> lock(running_);
  Program& decode = Opened("decode", level, room, 1);
  Caches made;
  made.level = level;
  made.room = room;
  Arguments(decode, true, made.buffers);
  return made;
}

std::string Programs::Rows(const Caches& caches, int tokens) const {
  std::string found;
  for (const auto& [name, shape] : shapes_.at(caches.level)) {
    size_t row = shape.row_bytes, head = row * static_cast<size_t>(caches.room);
    caches.buffers.at(name)->Read([&, heads = shape.heads](const void* from) {
      for (int each = 0; each < heads; ++each)
        found.append(static_cast<const char*>(from) + head * static_cast<size_t>(each),
                     row * static_cast<size_t>(tokens));
    });
  }
  return found;
}

void Programs::Restore(Caches& caches, const char* rows, int tokens) {
  for (const auto& [name, shape] : shapes_.at(caches.level)) {
    size_t row = shape.row_bytes, head = row * static_cast<size_t>(caches.room);
    size_t part = row * static_cast<size_t>(tokens);
    caches.buffers.at(name)->Write([&, heads = shape.heads](void* to) {
      for (int each = 0; each < heads; ++each, rows += part)
        std::memcpy(static_cast<char*>(to) + head * static_cast<size_t>(each), rows, part);
    });
  }
}

Caches Programs::Grown(const Caches& caches, int room, int tokens) {
  Caches grown = Made(caches.level, room);
  Restore(grown, Rows(caches, tokens).data(), tokens);
  return grown;
}

size_t Programs::RowBytes(int level) const {
  size_t found = 0;
  for (const auto& [name, shape] : shapes_.at(level))
    found += static_cast<size_t>(shape.heads) * shape.row_bytes;
  return found;
}

void Programs::Run(const std::string& kind, int size, Caches& caches, const int32_t* tokens, int count,
                   int at, std::vector<float>* logits) {
  std::lock_guard<std::mutex> lock(running_);
  Program& program = Opened(kind, caches.level, caches.room, size);
  std::vector<Handle> in = Arguments(program, true, caches.buffers),
                      out = Arguments(program, false, caches.buffers);
  bool verifies = kind == "verify";
  program.in.at("tokens")->Write([&](void* to) {
    auto* place = static_cast<int32_t*>(to);
    for (int each = 0; each < size; ++each) place[each] = each < count ? tokens[each] : 0;
  });
  program.in.at("input_pos")->Write([&](void* to) {
    auto* place = static_cast<int32_t*>(to);
    for (int each = 0; each < size; ++each) place[each] = each < count ? at + each : verifies ? at : kPadding;
  });
  if (verifies)
    program.in.at("mask")->Write([&](void* to) {
      auto* place = static_cast<unsigned char*>(to);
      for (int row = 0; row < size; ++row)
        for (int column = 0; column < size; ++column) *place++ = row < count && column <= row;
    });
  Check(LiteRtRunCompiledModel(compiled_, program.index, in.size(), in.data(), out.size(), out.data()),
        "run " + kind);
  if (auto found = program.out.find("logits"); logits && found != program.out.end()) {
    logits->resize(found->second->bytes() / sizeof(float));
    found->second->Read([&](const void* from) { std::memcpy(logits->data(), from, 4 * logits->size()); });
  }
}

std::vector<int> PlannedChunks(int tokens, const std::vector<int>& lengths) {
  if (tokens <= 0) return {};
  int longest = lengths.back(), head = std::max(0, (tokens - longest) / longest);
  std::vector<int> found(static_cast<size_t>(head), longest);
  std::map<std::pair<int, size_t>, std::vector<int>> known;
  std::vector<int> tail = Cheapest(tokens - head * longest, lengths, lengths.size(), known);
  found.insert(found.end(), tail.begin(), tail.end());
  return found;
}

}  // namespace jaxllm
