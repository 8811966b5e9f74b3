// Attention inside documents as XLA calls it.
#include "ffi_checks.h"

namespace jaxllm {
namespace {

bool same_shape(const AnyBuffer& a, const AnyBuffer& b) {
  if (a.element_type() != b.element_type() || rank(a) != rank(b)) return false;
  for (size_t i = 0; i < rank(a); i++) {
    if (dim(a, i) != dim(b, i)) return false;
  }
  return true;
}

// Reads the shape of q [B, T, K, G, H], k, v [B, T, K, H] and starts [B, T].
Error read_documents(const AnyBuffer& q, const AnyBuffer& k, const AnyBuffer& v, const AnyBuffer& starts,
                     float scale, DocumentShape& s) {
  if (rank(q) != 5 || q.element_type() != ffi::DataType::F32 || q.element_count() == 0)
    return wrong("queries must be float32 [B, T, K, G, H]");
  s = {dim(q, 0), dim(q, 1), dim(q, 2), dim(q, 3), dim(q, 4), scale};
  if (rank(k) != 4 || k.element_type() != ffi::DataType::F32 || dim(k, 0) != s.batch ||
      dim(k, 1) != s.tokens || dim(k, 2) != s.kv_heads || dim(k, 3) != s.width || !same_shape(k, v)) {
    return wrong("keys and values must be float32 [B, T, K, H] like the queries");
  }
  if (rank(starts) != 2 || starts.element_type() != ffi::DataType::S32 || dim(starts, 0) != s.batch ||
      dim(starts, 1) != s.tokens) {
    return wrong("starts must be int32 [B, T]");
  }
  if (!are_starts(starts.reinterpret_data<int32_t>(), s.batch, s.tokens)) {
    return wrong("a token's start must be its own position or the start of the token before");
  }
  return Error::Success();
}

bool is_lse(const AnyBuffer& lse, const DocumentShape& s) {
  return lse.element_type() == ffi::DataType::F32 &&
         lse.element_count() == s.batch * s.tokens * s.kv_heads * s.group;
}

// q [B, T, K, G, H], k, v [B, T, K, H], starts [B, T] -> out like q, log-sum-exp [B, T, K, G].
Error document_attention_call(AnyBuffer q, AnyBuffer k, AnyBuffer v, AnyBuffer starts,
                              ffi::Result<AnyBuffer> out, ffi::Result<AnyBuffer> lse, float scale) {
  const Timer timer;
  DocumentShape s;
  if (Error error = read_documents(q, k, v, starts, scale, s); error.failure()) return error;
  if (!same_shape(*out, q) || !is_lse(*lse, s)) return wrong("the result has another shape");
  return result(document_attention(q.reinterpret_data<float>(), k.reinterpret_data<float>(),
                                   v.reinterpret_data<float>(), starts.reinterpret_data<int32_t>(), s,
                                   out->reinterpret_data<float>(), lse->reinterpret_data<float>()));
}

// The same, its two results and what reaches the first -> what reaches q, k and v.
Error document_attention_gradients_call(AnyBuffer q, AnyBuffer k, AnyBuffer v, AnyBuffer starts,
                                        AnyBuffer out, AnyBuffer lse, AnyBuffer dout,
                                        ffi::Result<AnyBuffer> dq, ffi::Result<AnyBuffer> dk,
                                        ffi::Result<AnyBuffer> dv, float scale) {
  const Timer timer;
  DocumentShape s;
  if (Error error = read_documents(q, k, v, starts, scale, s); error.failure()) return error;
  if (!same_shape(out, q) || !same_shape(dout, q) || !is_lse(lse, s))
    return wrong("the result and its gradient must be as the queries");
  if (!same_shape(*dq, q) || !same_shape(*dk, k) || !same_shape(*dv, v))
    return wrong("the result has another shape");
  return result(document_attention_gradients(q.reinterpret_data<float>(), k.reinterpret_data<float>(),
                                             v.reinterpret_data<float>(), starts.reinterpret_data<int32_t>(),
                                             out.reinterpret_data<float>(), lse.reinterpret_data<float>(),
                                             dout.reinterpret_data<float>(), s, dq->reinterpret_data<float>(),
                                             dk->reinterpret_data<float>(), dv->reinterpret_data<float>()));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(DocumentAttentionHandler, document_attention_call,
                       takes<4>().Ret<AnyBuffer>().Ret<AnyBuffer>().Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER(DocumentAttentionGradientsHandler, document_attention_gradients_call,
                       takes<7>().Ret<AnyBuffer>().Ret<AnyBuffer>().Ret<AnyBuffer>().Attr<float>("scale"));

const Target kDocumentTargets[] = {
    {"jaxllm_document_attention", reinterpret_cast<void*>(+DocumentAttentionHandler)},
    {"jaxllm_document_attention_gradients", reinterpret_cast<void*>(+DocumentAttentionGradientsHandler)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
