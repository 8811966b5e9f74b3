// Attention over coded chunks in front of a cache, beside a plain one in double, and of trees: part of
// native_check.cpp.

// The half that a number of at least 2^-14 is cut to.
uint16_t half_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t exponent = bits >> 23 & 255;
  if (exponent < 113) return 0;
  return static_cast<uint16_t>(bits >> 16 & 0x8000 | (exponent - 112) << 10 | (bits >> 13 & 1023));
}

// Chunks of one layer, each of another width, and what they stand for.
struct Coded {
  ChunkForm form{};
  size_t heads, count;
  std::vector<Buffer<uint8_t>> blobs;
  std::vector<const uint8_t*> at;
  std::vector<int8_t> bits;
  // [chunks][keys, values][heads][tokens * width]
  std::vector<std::vector<double>> rows;

  Coded(Random& random, size_t heads, size_t width, bool half, size_t most) : heads(heads) {
    form.tokens = random.below(2) ? 16 : random.in(1, 40), form.width = width, form.half = half;
    form.rotated = random.below(3) == 0;
    form.keys_by_token = form.rotated || random.below(2);
    form.values_by_token = form.rotated || random.below(2);
    count = random.in(1, 1 + most / form.tokens);
    for (size_t i = 0; i < count; i++) {
      bits.push_back(std::vector<int8_t>{8, 4, 2, 0}[random.below(form.rotated ? 3 : 4)]);
      blobs.emplace_back(form.blob_bytes(heads, bits[i]));
      at.push_back(blobs[i].data());
      fill(random, i);
    }
  }
  size_t tokens() const { return count * form.tokens; }
  CodedChunks chunks() const { return {at.data(), bits.data(), heads, tokens(), form}; }
  double value(size_t head, size_t token, size_t h, bool values) const {
    const size_t chunk = token / form.tokens;
    return rows[(chunk * 2 + values) * heads + head][token % form.tokens * form.width + h];
  }

 private:
  void fill(Random& random, size_t chunk) {
    uint8_t* const blob = blobs[chunk].data();
    const int width = bits[chunk];
    for (size_t b = 0; b < blobs[chunk].size(); b++) blob[b] = static_cast<uint8_t>(random.below(256));
    ChunksShape shape{};
    static_cast<ChunkForm&>(shape) = form;
    for (const bool values : {false, true}) {
      const bool by_token = values ? form.values_by_token : form.keys_by_token;
      uint8_t* const part = blob + (values ? form.part_bytes(heads, width, form.keys_by_token) : 0);
      const size_t levels = heads * form.tokens * form.row_bytes(width);
      if (width == 0) {
        for (size_t i = 0; i < heads * form.tokens * form.width; i++) {
          const float x = static_cast<float>(random.unit() * 1.7);
          const uint16_t h = half_of(x);
          memcpy(part + i * (form.half ? 2 : 4), form.half ? static_cast<const void*>(&h) : &x,
                 form.half ? 2 : 4);
        }
      }
      const size_t scales = width ? heads * (by_token ? form.tokens : form.width) : 0;
      for (size_t i = 0; i < scales; i++) {
        const uint16_t low = half_of(static_cast<float>(random.unit() - 1.5));
        const uint16_t scale = half_of(static_cast<float>((random.unit() + 1.5) / ((1 << width) - 1)));
        memcpy(part + levels + 2 * i, &low, 2);
        memcpy(part + levels + 2 * (scales + i), &scale, 2);
      }
      for (size_t head = 0; head < heads; head++) {
        if (width) {
          rows.push_back(decoded(shape, heads, part, width, by_token, head));
          continue;
        }
        std::vector<double> own(form.tokens * form.width);
        for (size_t i = 0; i < own.size(); i++) {
          const uint8_t* from = part + (head * own.size() + i) * (form.half ? 2 : 4);
          uint16_t h;
          float x;
          memcpy(form.half ? static_cast<void*>(&h) : &x, from, form.half ? 2 : 4);
          own[i] = form.half ? half_value(h) : x;
        }
        rows.push_back(own);
      }
    }
  }
};

// Few and many tokens behind chunks that end anywhere.
void check_coded(Random& random) {
  AttentionShape s{};
  s.batch = 1, s.kv_heads = random.in(1, 3), s.group = random.in(1, 8);
  s.used_heads = random.below(2) ? s.kv_heads : random.in(1, s.kv_heads);
  s.tokens = random.below(2) ? 1 : random.in(1, 40), s.valid = s.tokens;
  s.width = random.below(3) ? 32 * random.in(1, 4) : 4 * random.in(1, 20);
  s.capacity = random.in(s.tokens, 100);
  s.half = random.below(2), s.window = random.below(2) ? 0 : random.in(1, 200);
  s.scale = 1.0f / sqrtf(static_cast<float>(s.width)), s.softcap = random.below(2) ? 0.0f : 5.0f;
  const Coded coded(random, s.used_heads, s.width, s.half, random.below(3) ? 200 : 1200);
  const size_t front = coded.tokens(), first = random.below(s.capacity - s.tokens + 1);
  std::vector<int32_t> rows(s.tokens), behind(s.tokens);
  for (size_t t = 0; t < s.tokens; t++) {
    behind[t] = static_cast<int32_t>(first + t);
    rows[t] = static_cast<int32_t>(front) + behind[t];
  }
  s.rows = s.positions = rows.data(), s.chunks = coded.chunks();
  shape = "coded " + std::to_string(coded.count) + " of " + std::to_string(coded.form.tokens) + " T " +
          std::to_string(s.tokens) + " at " + std::to_string(first) + " K " + std::to_string(s.kv_heads) +
          " used " + std::to_string(s.used_heads) + " G " + std::to_string(s.group) + " H " +
          std::to_string(s.width) + " window " + std::to_string(s.window) + (s.half ? " half" : "") +
          (coded.form.rotated ? " rotated" : "") + (coded.form.keys_by_token ? " by token" : "") +
          (coded.form.values_by_token ? ", by token" : "");
  const size_t new_rows = s.tokens * s.kv_heads;
  const Buffer<float> q(random.floats(new_rows * s.group * s.width, false)),
      k(random.floats(new_rows * s.width, false)), v(random.floats(new_rows * s.width, false));
  const Rows old_keys(random, s.kv_heads, s.capacity, s.width, first + s.tokens, s.half);
  const Rows old_values(random, s.kv_heads, s.capacity, s.width, first + s.tokens, s.half);
  Rows keys = old_keys.copy(), values = old_values.copy();
  Buffer<float> y(new_rows * s.group * s.width), mass(random.below(2) ? s.capacity : 0),
      chunk_mass(coded.count);
  if (mass.size()) s.chunk_mass = chunk_mass.data(), s.masses = coded.count;
  everywhere(
      y,
      [&] {
        keys = old_keys.copy(), values = old_values.copy();
        for (size_t i = 0; i < mass.size(); i++) mass.data()[i] = 1.0f;
        for (size_t i = 0; i < coded.count; i++) chunk_mass.data()[i] = 1.0f;
        must(attention(q.data(), k.data(), v.data(), nullptr, nullptr, keys.bytes.data(), values.bytes.data(),
                       s, y.data(), mass.size() ? mass.data() : nullptr));
      },
      [&] {
        AttentionShape own = s;
        own.rows = behind.data();
        judge_rows(own, k.data(), nullptr, nullptr, old_keys, keys);
        judge_rows(own, v.data(), nullptr, nullptr, old_values, values);
        own = s, own.capacity = front + s.capacity;
        Rows all_keys(random, s.kv_heads, own.capacity, s.width, 0, false);
        Rows all_values = all_keys.copy();
        for (size_t i = 0; i < s.used_heads * own.capacity * s.width; i++) {
          const size_t head = i / s.width / own.capacity, p = i / s.width % own.capacity, h = i % s.width;
          for (const bool of_values : {false, true}) {
            const Rows& cache = of_values ? values : keys;
            const float x = static_cast<float>(p < front ? coded.value(head, p, h, of_values)
                                                         : cache.at(head, p - front, h));
            memcpy((of_values ? all_values : all_keys).bytes.data() + i * 4, &x, 4);
          }
        }
        std::vector<double> seen(own.capacity, 0.0);
        const std::vector<double> expected =
            attended(own, q.data(), nullptr, nullptr, all_keys, all_values, seen);
        std::vector<double> wanted(coded.count + s.capacity, 1.0);
        for (size_t p = 0; p < own.capacity; p++) {
          wanted[p < front ? p / coded.form.tokens : coded.count + p - front] += seen[p];
        }
        for (size_t i = 0; mass.size() && i < wanted.size(); i++) {
          const double got = i < coded.count ? chunk_mass.data()[i] : mass.data()[i - coded.count];
          if (!(fabs(got - wanted[i]) <= 1e-3)) fail("mass is wrong", i, coded.count, got, wanted[i], 1e-3);
        }
        for (size_t i = 0; i < y.size(); i++) {
          if (i / s.width / s.group % s.kv_heads >= s.used_heads) continue;
          if (!(fabs(y.data()[i] - expected[i]) <= 2e-4))
            fail("attention is wrong", i / s.width, i % s.width, y.data()[i], expected[i], 2e-4);
        }
      });
}

// Tables of chunks: what fits is found, nothing else is opened.
void check_chunk_tables(Random& random) {
  shape = "tables of chunks";
  const Coded coded(random, random.in(1, 3), 4 * random.in(1, 20), random.below(2), 100);
  const auto made = [&] {
    ChunkTable table;
    table.form = coded.form, table.heads = {coded.heads}, table.bits = coded.bits, table.blobs = coded.at;
    for (const Buffer<uint8_t>& each : coded.blobs) table.bytes.push_back(each.size());
    return table;
  };
  const uint64_t handle = open_chunks(made());
  {
    OpenChunks found, wrong;
    const ChunkTable* const table = found.open(handle);
    if (!table || table->blobs != coded.at) fail("an open table is not found", 0, 0, 0, 0, 0);
    if (wrong.open(handle + (uint64_t{1} << 32))) fail("a wrong handle finds a table", 0, 0, 0, 0, 0);
  }
  if (!close_chunks(handle) || close_chunks(handle)) fail("a table is not closed once", 0, 0, 0, 0, 0);
  OpenChunks gone;
  if (gone.open(handle)) fail("a closed table is found", 0, 0, 0, 0, 0);
  const std::function<void(ChunkTable&)> changes[] = {
      [](ChunkTable& t) { t.bytes.back()++; },         [](ChunkTable& t) { t.bytes.front()--; },
      [](ChunkTable& t) { t.blobs.back() = nullptr; }, [](ChunkTable& t) { t.blobs.pop_back(); },
      [](ChunkTable& t) { t.bits.back() = 3; },        [](ChunkTable& t) { t.heads = {1 << 17}; },
      [](ChunkTable& t) { t.heads.clear(); },          [](ChunkTable& t) { t.form.width++; },
      [](ChunkTable& t) { t.form.tokens = 0; },        [](ChunkTable& t) { t.form.tokens++; }};
  for (const auto& change : changes) {
    ChunkTable table = made();
    change(table);
    if (!wrong_chunks(table) || open_chunks(table)) fail("a wrong table is opened", 0, 0, 0, 0, 0);
  }
}

// A tree's nodes read together give the bits that each gives alone, behind the nodes that lead to it.
void check_tree(Random& random) {
  AttentionShape s{};
  s.batch = 1, s.kv_heads = s.used_heads = random.in(1, 2), s.group = random.in(1, 9);
  s.tokens = s.nodes = s.valid = random.in(1, 40);
  s.width = random.below(2) ? 16 * random.in(1, 4) : random.in(1, 40);
  // Around the places where blocks and cuts end, too.
  s.base =
      random.below(2) ? random.below(1100) : 512 * random.in(1, 2) - std::min<size_t>(random.below(30), 20);
  s.window = random.below(2) ? 0 : random.in(1, 600);
  s.scale = 1.0f / sqrtf(static_cast<float>(s.width));
  s.softcap = random.below(2) ? 0.0f : 5.0f;
  s.half = random.below(2);
  // Perhaps behind chunks, whose rows are whole bytes at every width, and which end before the tree begins.
  std::unique_ptr<Coded> coded;
  if (s.base >= 40 && s.width % 4 == 0 && random.below(2)) {
    coded = std::make_unique<Coded>(random, s.kv_heads, s.width, s.half, s.base - 40);
    s.chunks = coded->chunks();
  }
  s.capacity = s.base + s.nodes + random.below(3) - s.chunks.tokens;
  shape = "tree of " + std::to_string(s.nodes) + " behind " + std::to_string(s.base) + " K " +
          std::to_string(s.kv_heads) + " G " + std::to_string(s.group) + " H " + std::to_string(s.width) +
          " window " + std::to_string(s.window) + (s.half ? " half" : "") + " coded " +
          std::to_string(s.chunks.tokens) + (s.chunks.form.rotated ? " rotated" : "");
  std::vector<std::vector<size_t>> paths(s.nodes);
  std::vector<int32_t> rows(s.nodes), positions(s.nodes);
  Buffer<uint8_t> seen(s.nodes * s.nodes);
  std::fill_n(seen.data(), seen.size(), 0);
  for (size_t node = 0; node < s.nodes; node++) {
    if (node) paths[node] = paths[random.below(3) ? node - 1 : random.below(node)];
    paths[node].push_back(node);
    for (size_t each : paths[node]) seen.data()[node * s.nodes + each] = 1;
    rows[node] = static_cast<int32_t>(s.base + node);
    positions[node] = static_cast<int32_t>(s.base + paths[node].size()) - 1;
  }
  s.rows = rows.data(), s.positions = positions.data(), s.seen = seen.data();
  const size_t of_row = s.kv_heads * s.width, of_query = of_row * s.group;
  const Buffer<float> q(random.floats(s.nodes * of_query, false)), k(random.floats(s.nodes * of_row, false)),
      v(random.floats(s.nodes * of_row, false));
  const Rows old_keys(random, s.kv_heads, s.capacity, s.width, s.base - s.chunks.tokens, s.half);
  const Rows old_values(random, s.kv_heads, s.capacity, s.width, s.base - s.chunks.tokens, s.half);
  Rows keys = old_keys.copy(), values = old_values.copy();
  Buffer<float> y(s.nodes * of_query), alone(of_query);
  everywhere(
      y,
      [&] {
        keys = old_keys.copy(), values = old_values.copy();
        must(attention(q.data(), k.data(), v.data(), nullptr, nullptr, keys.bytes.data(), values.bytes.data(),
                       s, y.data(), nullptr));
      },
      [&] {
        keys = old_keys.copy(), values = old_values.copy();
        const std::vector<size_t>& path = paths[random.below(s.nodes)];
        AttentionShape one = s;
        one.tokens = one.valid = 1, one.seen = nullptr, one.base = one.nodes = 0;
        for (size_t i = 0; i < path.size(); i++) {
          const int32_t row = static_cast<int32_t>(s.base + i);
          one.rows = one.positions = &row;
          must(attention(q.data() + path[i] * of_query, k.data() + path[i] * of_row,
                         v.data() + path[i] * of_row, nullptr, nullptr, keys.bytes.data(),
                         values.bytes.data(), one, alone.data(), nullptr));
          for (size_t j = 0; j < of_query; j++) {
            const float* among = y.data() + path[i] * of_query + j;
            if (memcmp(alone.data() + j, among, sizeof(float)))
              fail("a node alone gives other bits", path[i], j, alone.data()[j], *among, 0);
          }
        }
      });
}
