// XXH3 with 128 bits, as manifests have it; of more than 240 bytes, as all of a folder's files are.

#pragma once

#include <cstddef>
#include <string>

namespace jaxllm {

constexpr size_t kLeastChecked = 241;

// The checksum in hexadecimal digits; empty below kLeastChecked bytes.
std::string Checksum(const void* data, size_t bytes);

}  // namespace jaxllm
