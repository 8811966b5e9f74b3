#include "model.h"

#include <cstdint>
#include <cstring>

#include "failure.h"

namespace jaxllm {
namespace {

// Fields of tables in LiteRT's schema: of a model, and of a signature.
constexpr size_t kSubgraphs = 2, kSignatures = 7, kKey = 2, kSubgraph = 4;
// A subgraph's tensors, inputs, outputs and operators.
constexpr size_t kLists = 4;

// A flatbuffer, whose tables are at offsets; 0 is an absent one.
class Tables {
 public:
  Tables(char* data, size_t bytes) : data_(data), bytes_(bytes) {}

  template <typename Number = uint32_t>
  Number At(size_t place) const {
    Number found;
    std::memcpy(&found, Checked(place, sizeof found), sizeof found);
    return found;
  }
  void Put(size_t place, uint32_t number) {
    std::memcpy(Checked(place, sizeof number), &number, sizeof number);
    written.push_back(place);
  }
  size_t Field(size_t table, size_t index) const {
    size_t facts = table - static_cast<size_t>(static_cast<int64_t>(At<int32_t>(table))), at = 4 + 2 * index;
    uint16_t offset = at < At<uint16_t>(facts) ? At<uint16_t>(facts + at) : 0;
    return offset ? table + offset : 0;
  }
  // The vector or string that a field refers to.
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
  std::string Text(size_t place) const {
    size_t size = At(place);
    return {Checked(place + 4, size), size};
  }

  std::vector<size_t> written;

 private:
  char* Checked(size_t place, size_t size) const {
    Require(place && place < bytes_ && size <= bytes_ - place, JAXLLM_DAMAGED,
            "model.tflite is damaged; export the model again");
    return data_ + place;
  }

  char* data_;
  size_t bytes_;
};

}  // namespace

std::vector<size_t> KeepPrograms(char* model, size_t bytes, const std::set<std::string>& names) {
  Tables tables(model, bytes);
  // The first number of the file, which is at 0.
  uint32_t root = 0;
  Require(bytes > sizeof root, JAXLLM_DAMAGED, "model.tflite is damaged; export the model again");
  std::memcpy(&root, model, sizeof root);
  std::vector<size_t> subgraphs = tables.Members(tables.List(root, kSubgraphs)), kept;
  std::set<size_t> used, unused;
  size_t list = tables.List(root, kSignatures);
  for (size_t each : tables.Members(list)) {
    // Absent, it is the first.
    size_t field = tables.Field(each, kSubgraph), subgraph = field ? tables.At(field) : 0;
    Require(subgraph < subgraphs.size(), JAXLLM_DAMAGED, "model.tflite is damaged; export the model again");
    bool wanted = names.count(tables.Text(tables.List(each, kKey))) > 0;
    (wanted ? used : unused).insert(subgraph);
    if (wanted) kept.push_back(each);
  }
  for (size_t each : unused)
    for (size_t index = 0; index < kLists && !used.count(each); ++index)
      if (size_t place = tables.List(subgraphs[each], index)) tables.Put(place, 0);
  tables.Put(list, static_cast<uint32_t>(kept.size()));
  for (size_t index = 0; index < kept.size(); ++index) {
    size_t slot = list + 4 + 4 * index;
    tables.Put(slot, static_cast<uint32_t>(kept[index] - slot));
  }
  return tables.written;
}

}  // namespace jaxllm
