// The kernels, written once over sixteen lanes. A file per instruction set includes its lanes, then this.
//
// Only functions without linkage here, and no C++ library: a template instantiated with one instruction
// set and picked by the linker for all would stop older processors.
#include <float.h>
#include <math.h>

#include "backend.h"
#include "sampling.h"

namespace {

using namespace jaxllm;

#define ALWAYS_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

constexpr float kTiny = 1e-30f;

#include "quantize.inl"
#include "row.inl"
#include "few_rows.inl"
#include "tile.inl"
#include "low_rank.inl"
#include "activate.inl"
#include "float_rows.inl"
#include "chunks.inl"
#include "coded_chunks.inl"
#include "attention.inl"
#include "attention_tree.inl"
#include "document_attention.inl"
#include "tokens.inl"
#include "sampling.inl"

int64_t read_words(const void* data, size_t bytes) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
  I a = izero(), b = izero(), c = izero(), d = izero();
  for (size_t i = 0; i + 256 <= bytes; i += 256) {
    prefetch_block<4>(p + i, kAhead);
    a = iadd(a, iload(p + i));
    b = iadd(b, iload(p + i + 64));
    c = iadd(c, iload(p + i + 128));
    d = iadd(d, iload(p + i + 192));
  }
  return isum(iadd(iadd(a, b), iadd(c, d)));
}

constexpr Backend table(const char* name) {
  return Backend{name,   quantize,    rms_norm,   row_panels,   row_span,        join_spans,
                 tile,   tile_int32,  low_sums,   add_low,      floats_of,       activate,
                 attend, attend_tree, add_mass,   store_row,    unit_row,        largest,
                 draw,   read_words,  load_chunk, stream_fence, attend_document, attend_document_back};
}

}  // namespace
