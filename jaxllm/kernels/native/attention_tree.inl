// Attention of a token tree's nodes (LLMCad, arXiv 2309.04255, section 3.2), each as if it came alone behind
// the nodes that lead to it: part of compute.inl.
//
// Sums are made in the order in which `attend` makes them for one token at a time, so that verifying a tree
// gives to the bit what plain decoding gives. Keys before the tree are weighed for all nodes together, a
// block at a time. From the block in which the tree begins on, each node has blocks of its own: rows before
// the tree, then those of its path, each where its token stands.

// Calls `use(i, row)` for the i-th node of the path to a token, itself included; returns how many there are.
template <class Use>
ALWAYS_INLINE size_t walk_path(const Attention& a, size_t token, const Use& use) {
  size_t length = 0;
  for (size_t node = 0; node < a.present; node++) {
    if (a.seen[token * a.nodes + node]) use(length++, a.base + node);
  }
  return length;
}

// Of a token's own block [block, block + count) the keys or values behind the chunks', from row `begin` on,
// as floats [count][wide].
void gather(const Attention& a, const void* cache, size_t token, size_t block, size_t begin, size_t count,
            size_t wide, float* out) {
  const auto copy = [&](size_t row, size_t at, size_t rows) {
    float* to = out + at * wide;
    const float* from = cached_rows(rows_at(a, cache, row), a.half, a.width, wide, 0, rows, to);
    if (from != to) memcpy(to, from, rows * wide * sizeof(float));
  };
  if (begin < a.base) copy(begin, begin - block, (a.base < block + count ? a.base : block + count) - begin);
  walk_path(a, token, [&](size_t i, size_t row) {
    const size_t stands = a.base + i;
    if (stands >= block && stands < block + count) copy(row, stands - block, 1);
  });
}

// What row r sees of its token's own blocks [begin, end) goes to the rows of the cache where the keys lie,
// all against the largest score that the tile ends with.
void scatter_weights(const Attention& a, const AttentionTile& t, const TileScratch& own, size_t r,
                     size_t begin, size_t end) {
  const auto weight = [&](size_t row) -> float& {
    return own.weights_of(t, row / kKeyBlock * kKeyBlock)[r * kKeyBlock + row % kKeyBlock];
  };
  for (size_t block = begin; block < t.reach; block += kKeyBlock) {
    float& top = own.tops_of(t, block)[r];
    const float shrink = block < end ? __builtin_expf(top - t.top[r]) : 0.0f;
    top = t.top[r];
    // What saw no key has no largest score either.
    for (size_t i = 0; i < kKeyBlock; i++) {
      float& each = own.weights_of(t, block)[r * kKeyBlock + i];
      each = shrink > 0.0f ? each * shrink : 0.0f;
    }
  }
  const size_t token = t.first + r / a.group;
  size_t left = walk_path(a, token, [](size_t, size_t) {});
  // Rows do not lie before the places where their tokens stand: from the last on, none is in another's way.
  for (size_t node = a.present; node-- > 0;) {
    if (!a.seen[token * a.nodes + node]) continue;
    const size_t stands = a.base + --left, row = a.base + node;
    if (stands < begin || stands >= end || row == stands) continue;
    weight(row) = weight(stands);
    weight(stands) = 0.0f;
  }
}

// Scores of the queries of a token, from row `first` of its tile on, with the keys of its own block.
void score_own_keys(const Attention& a, const TileScratch& own, size_t first, size_t token, size_t block,
                    size_t count, bool few, float* scores) {
  const size_t coded = coded_count(a, block, count), wide = own.wide;
  const float* q = own.q + first * wide;
  if (few) {
    coded_key_scores(a, own, first, a.group, block, coded, scores);
    gather(a, a.k, token, block, block + coded, count, wide, own.values);
    return scores_of_few(a.group, q, own.values + coded * wide, count - coded, wide, scores + coded);
  }
  if (coded) coded_block(a, own, block, coded, false, own.values);
  for (size_t s = 0; s < coded && a.chunks.form.rotated; s++)
    spread(own.values + s * wide, a.width, a.chunks.form.block());
  gather(a, a.k, token, block, block + coded, count, wide, own.values);
  scores_of_many(a.group, q, own.values, count, wide, own.keys, scores);
}

// Adds the weighted values of its own block.
void sum_own_values(const Attention& a, const TileScratch& own, size_t token, size_t block, size_t count,
                    bool few, const float* weights, float* sums, bool& is_spread) {
  const size_t coded = coded_count(a, block, count), wide = own.wide;
  if (coded) add_coded_values(a, own, a.group, block, coded, few, weights, sums);
  if (is_spread) settle_sums(a, a.group, wide, sums);
  is_spread = false;
  gather(a, a.v, token, block, block + coded, count, wide, own.values);
  float_product(a.group, wide, weights + coded, kKeyBlock, own.values + coded * wide, wide, count - coded,
                sums, wide, true);
}

void attend_tree(const Attention& a, const AttentionTile& t) {
  const TileScratch own(a, t);
  const size_t wide = own.wide, tree = a.base / kKeyBlock * kKeyBlock;
  const size_t shared = t.to < tree ? t.to : tree;  // where the blocks end that all nodes see
  const bool few = a.group < kFewRows;              // as of one token
  bool is_spread = begins_spread(a, t.from);
  begin_tile(a, t, own);
  for (size_t block = t.from; block < shared; block += kKeyBlock) {
    float* scores = own.weights_of(t, block);
    score_keys(a, own, 0, own.rows, block, kKeyBlock, few, scores);
    bool any = false;
    for (size_t r = 0; r < own.rows; r++)
      any |= weigh_row(a, t, own, scores + r * kKeyBlock, r, block, kKeyBlock, shared);
    if (t.weights) memcpy(own.tops_of(t, block), t.top, own.rows * sizeof(float));
    if (any) sum_values(a, own, own.rows, block, kKeyBlock, few, scores, t.sums, is_spread);
  }
  const size_t begin = t.from < tree ? tree : t.from;
  for (size_t token = t.first; token < t.last; token++) {
    const size_t behind = a.base + walk_path(a, token, [](size_t, size_t) {});
    const size_t end = behind < t.to ? behind : t.to, first = (token - t.first) * a.group;
    float* sums = t.sums + first * wide;
    bool own_spread = is_spread;
    for (size_t block = begin; block < end; block += kKeyBlock) {
      const size_t count = end - block < kKeyBlock ? end - block : kKeyBlock;
      float* scores = own.weights_of(t, block) + first * kKeyBlock;
      score_own_keys(a, own, first, token, block, count, few, scores);
      for (size_t i = 0; i < a.group; i++) {
        weigh_row(a, t, own, scores + i * kKeyBlock, first + i, block, count, end);
        if (t.weights) own.tops_of(t, block)[first + i] = t.top[first + i];
      }
      sum_own_values(a, own, token, block, count, few, scores, sums, own_spread);
    }
    if (own_spread) settle_sums(a, a.group, wide, sums);
    for (size_t i = 0; t.weights && t.to > begin && i < a.group; i++)
      scatter_weights(a, t, own, first + i, begin, end < begin ? begin : end);
  }
}
