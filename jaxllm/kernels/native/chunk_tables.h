// Chunks by address: tables of the chunks of a context, which attention finds by a handle and a layer.
//
// Addresses, widths and sizes are checked when a table is made; a handle that is wrong, or of a closed table,
// finds nothing.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "backend.h"

namespace jaxllm {

struct ChunkTable {
  ChunkForm form{};
  std::vector<size_t> heads;          // in the blobs of each layer
  std::vector<int8_t> bits;           // of each chunk
  std::vector<const uint8_t*> blobs;  // [layers][chunks]
  std::vector<size_t> bytes;          // of each blob
};

// What is wrong with a table, or null.
const char* wrong_chunks(const ChunkTable& table);
// Opens a table in which nothing is wrong; its blobs' memory stays the caller's. 0 where there are too many.
uint64_t open_chunks(ChunkTable table);
// Closes a table when no kernel reads it any more; false where there is none.
bool close_chunks(uint64_t handle);

// A table, which is not closed while this lives.
class OpenChunks {
 public:
  OpenChunks() = default;
  OpenChunks(const OpenChunks&) = delete;
  OpenChunks& operator=(const OpenChunks&) = delete;
  ~OpenChunks();
  // Null where there is no such table.
  const ChunkTable* open(uint64_t handle);

 private:
  size_t slot_ = SIZE_MAX;
};

}  // namespace jaxllm
