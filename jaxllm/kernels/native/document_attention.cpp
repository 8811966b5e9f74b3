// Attention inside the documents of packed rows, for training: a task is one kv head of one document, so that
// no two tasks add to the same numbers and the number of threads plays no role.
#include <stdint.h>

#include <algorithm>
#include <atomic>

#include "ops.h"
#include "pool.h"

namespace jaxllm {
namespace {

// Tokens [first, last) of a packed row.
struct Part {
  size_t row, first, last;
  size_t tokens() const { return last - first; }
};

struct Parts {
  const Part* data;
  size_t count;
};

// All documents, the longest first, so that no thread ends with one; null data without memory.
Parts documents(const int32_t* starts, const DocumentShape& s) {
  Part* parts = static_cast<Part*>(thread_scratch(kHidden, s.batch * s.tokens * sizeof(Part)));
  if (!parts) return {nullptr, 0};
  size_t count = 0;
  for (size_t row = 0; row < s.batch; row++) {
    for (size_t t = 0; t < s.tokens; t++) {
      if (static_cast<size_t>(starts[row * s.tokens + t]) == t) parts[count++] = {row, t, t};
      parts[count - 1].last = t + 1;
    }
  }
  std::sort(parts, parts + count, [](const Part& a, const Part& b) {
    if (a.tokens() != b.tokens()) return a.tokens() > b.tokens();
    return a.row != b.row ? a.row < b.row : a.first < b.first;
  });
  return {parts, count};
}

// Where a kv head of a document begins in arrays [batch][tokens][kv_heads][each].
size_t offset(const DocumentShape& s, const Part& part, size_t head, size_t each) {
  return ((part.row * s.tokens + part.first) * s.kv_heads + head) * each;
}

// Calls work(document, part, head, scratch) for all kv heads of all documents.
template <class Work>
Failure each_document(const float* q, const float* k, const float* v, const int32_t* starts,
                      const DocumentShape& s, size_t (*scratch_floats)(size_t, size_t, size_t), Work work) {
  const Parts parts = documents(starts, s);
  if (!parts.data) return kNoMemory;
  std::atomic<bool> failed{false};
  const auto task = [&](size_t i) {
    const Part& part = parts.data[i / s.kv_heads];
    const size_t head = i % s.kv_heads,
                 bytes = scratch_floats(part.tokens(), s.group, s.width) * sizeof(float);
    float* scratch = static_cast<float*>(thread_scratch(kTaskWork, bytes));
    if (!scratch) {
      failed = true;
      return;
    }
    Document d{};
    d.q = q + offset(s, part, head, s.group * s.width);
    d.k = k + offset(s, part, head, s.width), d.v = v + offset(s, part, head, s.width);
    d.query_stride = s.kv_heads * s.group * s.width, d.key_stride = s.kv_heads * s.width;
    d.lse_stride = s.kv_heads * s.group;
    d.tokens = part.tokens(), d.group = s.group, d.width = s.width, d.scale = s.scale;
    work(d, part, head, scratch);
  };
  parallel(parts.count * s.kv_heads, task);
  return failed ? kNoMemory : nullptr;
}

}  // namespace

bool are_starts(const int32_t* starts, size_t batch, size_t tokens) {
  for (size_t i = 0; i < batch * tokens; i++) {
    const size_t t = i % tokens;
    const bool begins = starts[i] >= 0 && static_cast<size_t>(starts[i]) == t;
    if (!begins && (t == 0 || starts[i] != starts[i - 1])) return false;
  }
  return true;
}

Failure document_attention(const float* q, const float* k, const float* v, const int32_t* starts,
                           const DocumentShape& s, float* out, float* lse) {
  const Backend& kernels = backend();
  return each_document(q, k, v, starts, s, document_scratch,
                       [&](const Document& d, const Part& part, size_t head, float* scratch) {
                         kernels.attend_document(d, out + offset(s, part, head, s.group * s.width),
                                                 lse + offset(s, part, head, s.group), scratch);
                       });
}

Failure document_attention_gradients(const float* q, const float* k, const float* v, const int32_t* starts,
                                     const float* out, const float* lse, const float* dout,
                                     const DocumentShape& s, float* dq, float* dk, float* dv) {
  const Backend& kernels = backend();
  return each_document(q, k, v, starts, s, document_gradients_scratch,
                       [&](const Document& d, const Part& part, size_t head, float* scratch) {
                         const size_t queries = offset(s, part, head, s.group * s.width),
                                      keys = offset(s, part, head, s.width);
                         kernels.attend_document_back(d, out + queries, lse + offset(s, part, head, s.group),
                                                      dout + queries, dq + queries, dk + keys, dv + keys,
                                                      scratch);
                       });
}

}  // namespace jaxllm
