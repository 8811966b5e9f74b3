// Runs the programs of an exported TFLite model by the C API of LiteRT.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// What is used of LiteRT 2.3's C API (litert/c/*.h), whose headers Python's wheel does not have.
extern "C" {
using LiteRtStatus = int;
using Handle = void*;
struct alignas(8) TensorType {  // An element's type, the rank, 8 dimensions, 8 strides.
  int32_t element;
  uint32_t rank_and_strides;
  int32_t dimensions[8];
  uint32_t strides[8];
};
LiteRtStatus LiteRtCreateEnvironment(int count, const void* options, Handle* environment);
void LiteRtDestroyEnvironment(Handle environment);
LiteRtStatus LiteRtCreateModelFromFile(Handle environment, const char* path, Handle* model);
void LiteRtDestroyModel(Handle model);
LiteRtStatus LiteRtGetNumModelSignatures(Handle model, size_t* count);
LiteRtStatus LiteRtGetModelSignature(Handle model, size_t index, Handle* signature);
LiteRtStatus LiteRtGetSignatureKey(Handle signature, const char** key);
LiteRtStatus LiteRtGetNumSignatureInputs(Handle signature, size_t* count);
LiteRtStatus LiteRtGetNumSignatureOutputs(Handle signature, size_t* count);
LiteRtStatus LiteRtGetSignatureInputName(Handle signature, size_t index, const char** name);
LiteRtStatus LiteRtGetSignatureOutputName(Handle signature, size_t index, const char** name);
LiteRtStatus LiteRtGetSignatureInputTensorByIndex(Handle signature, size_t index, Handle* tensor);
LiteRtStatus LiteRtGetSignatureOutputTensorByIndex(Handle signature, size_t index, Handle* tensor);
LiteRtStatus LiteRtGetRankedTensorType(Handle tensor, TensorType* type);
LiteRtStatus LiteRtCreateOptions(Handle* options);
void LiteRtDestroyOptions(Handle options);
LiteRtStatus LiteRtSetOptionsHardwareAccelerators(Handle options, int accelerators);
LiteRtStatus LiteRtCreateOpaqueOptions(const char* name, void* payload, void (*destroy)(void*),
                                       Handle* options);
LiteRtStatus LiteRtAddOpaqueOptions(Handle options, Handle opaque);
LiteRtStatus LiteRtCreateCompiledModel(Handle environment, Handle model, Handle options, Handle* compiled);
void LiteRtDestroyCompiledModel(Handle compiled);
LiteRtStatus LiteRtGetCompiledModelInputBufferRequirements(Handle, size_t signature, size_t index, Handle*);
LiteRtStatus LiteRtGetCompiledModelOutputBufferRequirements(Handle, size_t signature, size_t index, Handle*);
LiteRtStatus LiteRtCreateManagedTensorBufferFromRequirements(Handle environment, const TensorType*, Handle,
                                                             Handle*);
void LiteRtDestroyTensorBuffer(Handle buffer);
LiteRtStatus LiteRtGetTensorBufferPackedSize(Handle buffer, size_t* bytes);
LiteRtStatus LiteRtLockTensorBuffer(Handle buffer, void** address, int mode);
LiteRtStatus LiteRtUnlockTensorBuffer(Handle buffer);
LiteRtStatus LiteRtRunCompiledModel(Handle compiled, size_t signature, size_t inputs, Handle* in,
                                    size_t outputs, Handle* out);
}

namespace {

constexpr int kWhole = 100, kCpu = 1, kReading = 0, kWriting = 1;

void Check(LiteRtStatus status, const char* what) {
  if (status != 0)
    throw std::runtime_error(std::string("LiteRT refuses to ") + what + " (status " + std::to_string(status) +
                             ")");
}

// A tensor in memory that LiteRT manages.
class Buffer {
 public:
  explicit Buffer(Handle handle) : handle_(handle) {}
  Buffer(const Buffer&) = delete;
  ~Buffer() { LiteRtDestroyTensorBuffer(handle_); }

  // Runs `use(address, bytes)` on the tensor's bytes.
  void Locked(int mode, const std::function<void(void*, size_t)>& use) {
    void* address = nullptr;
    size_t bytes = 0;
    Check(LiteRtGetTensorBufferPackedSize(handle_, &bytes), "measure a buffer");
    Check(LiteRtLockTensorBuffer(handle_, &address, mode), "lock a buffer");
    use(address, bytes);
    Check(LiteRtUnlockTensorBuffer(handle_), "unlock a buffer");
  }
  void Clear() {
    Locked(kWriting, [](void* to, size_t bytes) { std::memset(to, 0, bytes); });
  }
  void Write(const std::vector<int32_t>& values) {
    Locked(kWriting, [&](void* to, size_t bytes) {
      std::memcpy(to, values.data(), std::min(bytes, 4 * values.size()));
    });
  }
  Handle handle() const { return handle_; }

 private:
  Handle handle_;
};

using Buffers = std::map<std::string, std::unique_ptr<Buffer>>;

// Two sets of a level's caches: a program reads one and writes the other.
struct Caches {
  Buffers filled, spare;
};

// A program by its signature's name: [level_L_][cache_S_]kind[_T].
struct Program {
  size_t index = 0;
  Handle signature = nullptr;
  std::string kind;
  int level = kWhole, tokens = 1, cache = 0;
  Buffers inputs, outputs;  // But for caches.
};

// The number behind a prefix, which is taken away from `name`; `otherwise` without it.
int Taken(std::string& name, const std::string& prefix, int otherwise) {
  if (name.rfind(prefix, 0) != 0) return otherwise;
  size_t end = 0;
  int value = std::stoi(name.substr(prefix.size()), &end);
  name = name.substr(std::min(name.size(), prefix.size() + end + 1));
  return value;
}

class Model {
 public:
  Model(const std::string& path, int threads) {
    Check(LiteRtCreateEnvironment(0, nullptr, &environment_), "start");
    Check(LiteRtCreateModelFromFile(environment_, path.c_str(), &model_), ("open " + path).c_str());
    Handle options = nullptr, cpu = nullptr;
    Check(LiteRtCreateOptions(&options), "take options");
    Check(LiteRtSetOptionsHardwareAccelerators(options, kCpu), "run on the CPU");
    if (threads) {
      std::string facts = "num_threads = " + std::to_string(threads) + "\n";
      Check(LiteRtCreateOpaqueOptions("xnnpack", strdup(facts.c_str()), free, &cpu), "take CPU options");
      Check(LiteRtAddOpaqueOptions(options, cpu), "take CPU options");
    }
    Check(LiteRtCreateCompiledModel(environment_, model_, options, &compiled_), "compile the model");
    LiteRtDestroyOptions(options);
    size_t count = 0;
    Check(LiteRtGetNumModelSignatures(model_, &count), "list signatures");
    for (size_t index = 0; index < count; ++index) Add(index);
  }
  Model(const Model&) = delete;
  ~Model() {
    caches_.clear();
    programs_.clear();
    LiteRtDestroyCompiledModel(compiled_);
    LiteRtDestroyModel(model_);
    LiteRtDestroyEnvironment(environment_);
  }

  std::vector<int> Levels() const {
    std::vector<int> found;
    for (const auto& each : programs_)
      if (std::find(found.begin(), found.end(), each->level) == found.end()) found.push_back(each->level);
    std::sort(found.begin(), found.end());
    return found;
  }

  // The lengths of prefill chunks, ascending.
  std::vector<int> Chunks(int level, int cache) const {
    std::vector<int> found;
    for (const auto& each : programs_)
      if (each->kind == "prefill" && each->level == level && each->cache == cache)
        found.push_back(each->tokens);
    std::sort(found.begin(), found.end());
    return found;
  }

  // The shortest caches that hold `tokens`; 0 is the whole context.
  int CacheFor(int level, int tokens) const {
    int best = 0;
    for (const auto& each : programs_)
      if (each->kind == "decode" && each->level == level && each->cache >= tokens &&
          (!best || each->cache < best))
        best = each->cache;
    int room = Room(level, best);
    if (tokens > room)
      throw std::runtime_error("prompt and answer take " + std::to_string(tokens) +
                               " tokens, and programs have room for " + std::to_string(room) +
                               "; shorten them, or export with a longer --context");
    return best;
  }

  // Positions of the caches: their third dimension.
  int Room(int level, int cache) const {
    Handle tensor = nullptr;
    TensorType type;
    const Program& program = Find("decode", level, cache, 1);
    Check(LiteRtGetSignatureInputTensorByIndex(program.signature, 0, &tensor), "name a cache");
    Check(LiteRtGetRankedTensorType(tensor, &type), "tell a cache's shape");
    return type.dimensions[2];
  }

  void Start(int level, int cache) {
    for (auto& [name, buffer] : CachesOf(level, cache).filled) buffer->Clear();
  }

  // Runs tokens that begin at a position; a token is padding if its position is not behind the one before it.
  Program& Run(const std::string& kind, int level, int cache, int length, std::vector<int32_t> tokens,
               int at) {
    Program& program = Find(kind, level, cache, length);
    std::vector<int32_t> positions(length, 0);
    for (size_t each = 0; each < tokens.size(); ++each) positions[each] = at + static_cast<int>(each);
    tokens.resize(length, 0);
    program.inputs.at("tokens")->Write(tokens);
    program.inputs.at("input_pos")->Write(positions);
    Caches& caches = CachesOf(level, cache);
    std::vector<Handle> in = Arguments(program, true, caches.filled),
                        out = Arguments(program, false, caches.spare);
    Check(LiteRtRunCompiledModel(compiled_, program.index, in.size(), in.data(), out.size(), out.data()),
          "run");
    std::swap(caches.filled, caches.spare);
    return program;
  }

 private:
  void Add(size_t index) {
    auto program = std::make_unique<Program>();
    const char* key = nullptr;
    Check(LiteRtGetModelSignature(model_, index, &program->signature), "give a signature");
    Check(LiteRtGetSignatureKey(program->signature, &key), "name a signature");
    std::string name = key;
    program->index = index;
    program->level = Taken(name, "level_", kWhole);
    program->cache = Taken(name, "cache_", 0);
    program->kind = name.substr(0, name.find('_'));
    // Trees and blocks have further inputs, and are not run here; neither is the tiny LM.
    if (program->kind != "prefill" && program->kind != "decode") return;
    program->tokens = Taken(name, program->kind + "_", 1);
    programs_.push_back(std::move(program));
  }

  Program& Find(const std::string& kind, int level, int cache, int tokens) const {
    for (const auto& each : programs_)
      if (each->kind == kind && each->level == level && each->cache == cache && each->tokens == tokens)
        return *each;
    throw std::runtime_error("the model has no signature " + kind + " of " + std::to_string(tokens) +
                             " tokens at level " + std::to_string(level) +
                             "; export that level, or ask for another");
  }

  std::unique_ptr<Buffer> Made(const Program& program, bool input, size_t index) {
    Handle tensor = nullptr, needs = nullptr, buffer = nullptr;
    TensorType type;
    Check((input ? LiteRtGetSignatureInputTensorByIndex : LiteRtGetSignatureOutputTensorByIndex)(
              program.signature, index, &tensor),
          "give a tensor");
    Check(LiteRtGetRankedTensorType(tensor, &type), "tell a tensor's shape");
    Check((input ? LiteRtGetCompiledModelInputBufferRequirements
                 : LiteRtGetCompiledModelOutputBufferRequirements)(compiled_, program.index, index, &needs),
          "tell what a buffer needs");
    Check(LiteRtCreateManagedTensorBufferFromRequirements(environment_, &type, needs, &buffer),
          "make a buffer");
    return std::make_unique<Buffer>(buffer);
  }

  // The program's inputs or outputs in order, caches of the set `caches` among them; buffers are made at
  // first.
  std::vector<Handle> Arguments(Program& program, bool input, Buffers& caches) {
    size_t count = 0;
    Check((input ? LiteRtGetNumSignatureInputs : LiteRtGetNumSignatureOutputs)(program.signature, &count),
          "count tensors");
    std::vector<Handle> found;
    for (size_t index = 0; index < count; ++index) {
      const char* name = nullptr;
      Check((input ? LiteRtGetSignatureInputName : LiteRtGetSignatureOutputName)(program.signature, index,
                                                                                 &name),
            "name a tensor");
      bool cache = std::strncmp(name, "kv_cache_", 9) == 0;
      auto& buffer = (cache ? caches : input ? program.inputs : program.outputs)[name];
      if (!buffer) {
        buffer = Made(program, input, index);
        // Zeros are no adapter, for programs that take one.
        buffer->Clear();
      }
      found.push_back(buffer->handle());
    }
    return found;
  }

  Caches& CachesOf(int level, int cache) {
    Caches& found = caches_[{level, cache}];
    if (found.filled.empty()) {
      // All programs of a level over one length share them, and their own inputs are made, too.
      for (const auto& each : programs_)
        if (each->level == level && each->cache == cache) {
          Arguments(*each, true, found.filled);
          Arguments(*each, false, found.spare);
        }
      for (auto* buffers : {&found.filled, &found.spare})
        for (auto& [name, buffer] : *buffers) buffer->Clear();
    }
    return found;
  }

  Handle environment_ = nullptr, model_ = nullptr, compiled_ = nullptr;
  std::vector<std::unique_ptr<Program>> programs_;
  std::map<std::pair<int, int>, Caches> caches_;
};

}  // namespace
