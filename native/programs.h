// Runs the programs of a model by LiteRT, one at a time.

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "folder.h"
#include "litert.h"

namespace jaxllm {

// A tensor in memory that LiteRT manages.
class Buffer {
 public:
  explicit Buffer(Handle handle) : handle_(handle) {}
  Buffer(const Buffer&) = delete;
  ~Buffer() { LiteRtDestroyTensorBuffer(handle_); }
  // Runs `use(address)` on the tensor's bytes.
  void Read(const std::function<void(const void*)>& use) const;
  void Write(const std::function<void(void*)>& use);
  size_t bytes() const;
  Handle handle() const { return handle_; }

 private:
  Handle handle_;
};

using Buffers = std::map<std::string, std::unique_ptr<Buffer>>;

// Keys and values of a sequence at a level, in caches of `room` positions. A program updates them in place:
// it reads an old row only to write it again.
struct Caches {
  int level = 0, room = 0;
  Buffers buffers;
};

// A cache's shape without its positions.
struct CacheShape {
  int heads;
  size_t row_bytes;  // Of a position of a head.
};

class Programs {
 public:
  Programs(const Folder& folder, int threads);
  Programs(const Programs&) = delete;
  ~Programs();

  std::vector<int> Levels() const;
  // Lengths of caches of a level, ascending.
  std::vector<int> Rooms(int level) const;
  // Tokens of programs of a kind, ascending.
  std::vector<int> Sizes(const std::string& kind, int level, int room) const;

  // Empty caches; and longer ones with the first `tokens` rows of others.
  Caches Made(int level, int room);
  Caches Grown(const Caches& caches, int room, int tokens);
  // The first `tokens` rows of every cache, one after the other; and caches that begin with them.
  std::string Rows(const Caches& caches, int tokens) const;
  void Restore(Caches& caches, const char* rows, int tokens);
  size_t RowBytes(int level) const;

  // Runs consecutive tokens from position `at` on by the program of `size` tokens; each token attends to
  // those before it. Puts the logits of all tokens into `logits`, unless that is null or the program has
  // none.
  void Run(const std::string& kind, int size, Caches& caches, const int32_t* tokens, int count, int at,
           std::vector<float>* logits);

  int threads() const { return threads_; }

 private:
  struct Tensor {
    std::string name;
    TensorType type;
  };
  struct Program {
    std::string name, kind;
    size_t index = 0;  // While it is open.
    int level = 0, room = 0, tokens = 0;
    std::vector<Tensor> inputs, outputs;
    Buffers in, out;  // But for caches.
  };
  using Key = std::tuple<std::string, int, int, int>;

  void Add(Handle handle, const Signature& signature, int vocab);
  // Finds a program, and opens it with those that any request over the same caches needs, and with all that
  // were open: the runtime holds memory for each.
  Program& Opened(const std::string& kind, int level, int room, int tokens);
  void Compile();
  std::map<std::string, std::pair<size_t, Handle>> Listed() const;
  std::unique_ptr<Buffer> MadeBuffer(const Program& program, bool input, size_t index);
  std::vector<Handle> Arguments(Program& program, bool input, Buffers& caches);
  void Release();

  const Manifest& manifest_;
  Mapped& file_;
  int threads_;
  Handle environment_ = nullptr, model_ = nullptr, compiled_ = nullptr;
  std::map<Key, Program> programs_;
  std::map<int, std::map<std::string, CacheShape>> shapes_;  // By level and name.
  std::set<std::string> open_;                               // Names of programs.
  std::mutex running_;
};

// Chunk lengths that cover `tokens` at least cost, as the Python loop has them: a chunk costs its length,
// padding included, and a constant. Only the last is padded. Lengths are ascending.
std::vector<int> PlannedChunks(int tokens, const std::vector<int>& lengths);

}  // namespace jaxllm
