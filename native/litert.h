// What is used of LiteRT 2.3's C API (litert/c/*.h), whose headers Python's wheel does not have.

#pragma once

#include <cstddef>
#include <cstdint>

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
// Reads the buffer where it is: it must outlive the model.
LiteRtStatus LiteRtCreateModelFromBuffer(Handle environment, const void* buffer, size_t bytes, Handle* model);
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
