// Leaves programs of a model out, so that the runtime does not open them.

#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <vector>

namespace jaxllm {

// Empties the subgraphs of a `.tflite` file that none of the signatures `names` runs, and removes the other
// signatures, in place; returns the offsets of the numbers that it wrote. Throws if the file is damaged.
std::vector<size_t> KeepPrograms(char* model, size_t bytes, const std::set<std::string>& names);

}  // namespace jaxllm
