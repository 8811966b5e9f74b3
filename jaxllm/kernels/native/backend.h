// What the kernels are, for every instruction set alike: plain structures and one table of functions.
//
// A weight is stored in blocks of 16 outputs x 32 inputs, each block as [8][16][4] bytes (four inputs of
// one output are adjacent, which is what every byte-product instruction wants). At 4 bits two such
// quarters share their bytes: [4][16][4], the low nibbles of byte row v holding inputs 8v..8v+3, the high
// ones 8v+4..8v+7, stored plus 8. At 2 bits four quarters do: [2][16][4], from the lowest bits of byte row v
// inputs 16v..16v+3 and so on, whose codes 0 to 3 stand for -3, -1, 1 and 3. Blocks lie panel by panel (16
// outputs after another) when units are outputs, and input block by input block when units are inputs: a
// prefix of units is a prefix of memory.
//
// A nested weight of 8 bits lies in two planes of 4 bits, each in blocks: level = 16 * high + low, where both
// are in -8..7. The high plane alone is a weight of 4 bits. Its scales are bytes: a float for each output of
// a panel, and of each group a factor of 4 bits for each output, which the float is multiplied with: codes 8
// to 15 as they are, 0 to 7 less 16. Byte j of 8 has output j's in its low bits, output j + 8's in its high
// ones.
//
// A weight of 4 bits with minima has a half more for each output and group, behind the panel's scales: its
// value is scale * q + minimum, where q in 0..15 is the nibble as it is stored.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace jaxllm {

constexpr int kPanel = 16;  // outputs of a block
constexpr int kBlock = 32;  // inputs of a block
constexpr int kSpan = 256;  // inputs that share one activation scale
constexpr int kSpanBlocks = kSpan / kBlock;
constexpr int kOutliers = 2;                   // inputs of a span that may lie beyond 127 steps
constexpr int kOutlierSteps = 128;             // that a level of their high parts counts
constexpr size_t kChannelsBytes = kPanel * 4;  // of nested scales: a panel's floats
constexpr size_t kFactorsBytes = kPanel / 2;   // and its factors of a group
constexpr int kTaskPanels = 4;  // outputs / 16 that one task of a product with many rows computes
constexpr int kTaskRows = 256;  // rows of it at a time, whose activations stay in the second-level cache

// Inputs come in `segments` (the kv heads of an output projection; else one) of `length` each, padded to
// whole blocks; scales never cross from one to the next.
struct Inputs {
  size_t segments, length;
  size_t blocks() const { return (length + kBlock - 1) / kBlock; }  // of a segment
  size_t spans() const { return (length + kSpan - 1) / kSpan; }     // of a segment
  size_t all_blocks() const { return segments * blocks(); }
  size_t all_spans() const { return segments * spans(); }
  size_t span_block(size_t span) const { return span / spans() * blocks() + span % spans() * kSpanBlocks; }
  size_t span_blocks(size_t span) const {
    const size_t left = blocks() - span % spans() * kSpanBlocks;
    return left < kSpanBlocks ? left : kSpanBlocks;
  }
};

struct Matrix {
  const uint8_t* data;
  const uint8_t* low;  // the low plane of a nested weight, like `data`; null to read its high plane alone
  const void* scale;   // group 0: float [segments][panels * 16]; else half, 16 per panel and group; or nested
  int bits, group;     // 2, 4 or 8, of a plane; inputs per scale: 0 (a whole segment), 32 or 64
  bool nested, minima;
  Inputs inputs;
  size_t panels;                                  // of the product: ceil(outputs / 16)
  size_t panel_stride, block_stride;              // bytes from one panel, one input block to the next
  size_t scale_panel_stride, scale_group_stride;  // scales from one panel, one group to the next
  // Of nested scales these are bytes, and so are the strides of segments and of panels' floats, and where
  // factors begin.
  size_t scale_segment_stride, channel_stride, factors_at;
  // Whether 4-bit and 2-bit weights of groups are read as 8-bit ones that share a scale: faster for many
  // rows, but not to the bit what is got without.
  bool widen;
  // Of a nested weight of one row what the high plane gives each group, [panels][groups][16]; null for
  // products that are made whole. It is filled first, and read when the low plane is there (`finishing`).
  int32_t* early;
  bool finishing;
  bool widened() const { return widen && group && bits != 8 && !minima; }
  size_t planes() const { return low ? 2 : 1; }
  size_t groups() const { return group ? (inputs.length + group - 1) / group : 1; }  // of a segment
};

// What a row's largest inputs have in a span besides their levels, by quarters of 4 inputs, zeros behind the
// last: value = (q + 128 * high) * scale. So the others have a step as fine as theirs allows.
struct Outliers {
  int8_t high[kOutliers][4];
  int16_t sum[kOutliers];      // of a quarter's
  uint8_t quarter[kOutliers];  // which one of the span's
  bool some;
};

// Activations in 8 bits, one scale per span: value = q * scale, and what outliers have besides. Rows that
// held NaN or infinity have NaN for all scales; magnitudes under 1e-30 count as zero.
struct Activations {
  const int8_t* q;           // [rows rounded up to 16][stride], zeros where there is no input
  size_t stride;             // bytes: a multiple of 64
  const float* scale;        // [rows][all_spans]
  const int32_t* span_sum;   // [rows][all_spans]
  const int32_t* block_sum;  // [rows][all_blocks]
  const Outliers* outliers;  // [rows][all_spans], or null for none
};

// How chunks of a cache are kept as bytes (jaxllm/contexts/codecs.py).
struct ChunkForm {
  size_t tokens, width;  // of a chunk, of a head
  bool half;             // rows of 0 bits are of halves, else of floats
  bool keys_by_token, values_by_token;
  bool rotated;

  // Channels that are transformed together; 1 for none.
  size_t block() const { return rotated ? width & (~width + 1) : 1; }
  size_t row_bytes(int bits) const {
    return bits ? width * static_cast<size_t>(bits) / 8 : width * (half ? 2 : 4);
  }
  // Of the keys or the values of so many heads.
  size_t part_bytes(size_t heads, int bits, bool by_token) const {
    const size_t scales = bits ? 2 * 2 * (by_token ? tokens : width) : 0;
    return heads * (tokens * row_bytes(bits) + scales);
  }
  // Of one layer of a chunk.
  size_t blob_bytes(size_t heads, int bits) const {
    return part_bytes(heads, bits, keys_by_token) + part_bytes(heads, bits, values_by_token);
  }
};

// Where one head's keys or values of a chunk stand in its blob.
struct ChunkPart {
  const uint8_t* data;         // [tokens][row_bytes]: levels, or of 0 bits the rows
  const uint8_t *low, *scale;  // halves, not aligned: [width], or by token [tokens]
  int bits;
  bool by_token;

  ChunkPart(const ChunkForm& form, const uint8_t* blob, size_t heads, size_t head, int bits, bool values)
      : bits(bits), by_token(values ? form.values_by_token : form.keys_by_token) {
    if (values) blob += form.part_bytes(heads, bits, form.keys_by_token);
    const size_t levels = form.tokens * form.row_bytes(bits), shared = by_token ? form.tokens : form.width;
    data = blob + head * levels;
    low = blob + heads * levels + 2 * head * shared;
    scale = low + 2 * heads * shared;
  }
};

// A layer's chunks, whose tokens come before those of its cache.
struct CodedChunks {
  const uint8_t* const* blobs;  // of each chunk
  const int8_t* bits;           // of each: 8, 4, 2, or 0 for rows as the cache holds them
  size_t heads;                 // in the blobs
  size_t tokens;                // of the chunks that are attended to together: whole chunks
  ChunkForm form;
};

struct Attention {
  const float* q;  // [tokens][row_stride], G heads of H floats each at its start
  float* out;      // like q
  size_t row_stride;
  const void *k, *v;       // [S][H] of one kv head
  const float *cos, *sin;  // [tokens][rotary] that turn the queries, or null
  size_t rotary;           // half the dimensions that turn
  bool half;               // k and v are IEEE half, else float
  size_t tokens, group, width;
  const int32_t *rows, *positions;  // [tokens]: where they lie, ascending, and where they stand
  const uint8_t* seen;              // [tokens][nodes]: which rows from `base` on each sees, or null
  size_t base, nodes, present;      // of the nodes, the first that the cache has room for
  size_t window;                    // 0: all rows up to its own
  float scale, softcap;
  // [group][distances], what is added to scores (see AttentionShape); null for nothing.
  const float* bias;
  size_t distances;
  const float* sink_logits;  // [group] (see AttentionShape), or null
  // Rows count from the first token of the chunks on; k and v begin with row chunks.tokens.
  CodedChunks chunks;
  size_t head;  // of those in the chunks
};

// Tile of attention over keys [from, to) for tokens [first, last): unnormalized sums and what merges them. A
// tree's node stands behind its path: its keys lie before `reach`.
struct AttentionTile {
  size_t first, last, from, to, reach;
  float *sums, *top, *total;  // [rows][width rounded up to 16], [rows], [rows]
  float* scratch;             // attention_scratch() floats
  // Of each block of keys what each row sees of them, and each row's `top` when they were weighed; or null.
  float *weights, *tops;  // [blocks][rows][kKeyBlock], [blocks][rows rounded up to 16]
};

// One kv head of one document: a run of tokens of a packed row that see each other and nothing else.
struct Document {
  const float* q;      // [tokens][query_stride], G heads of H floats each at its start
  const float *k, *v;  // [tokens][key_stride], H floats each at its start
  size_t query_stride, key_stride;
  size_t lse_stride;  // between two tokens' G log-sum-exps
  size_t tokens, group, width;
  float scale;
};

// Keys or values of one kv head of a chunk, as bytes, and where its rows go.
struct Chunk {
  const uint8_t* data;         // [tokens][width * bits / 8] levels of 8, 4 or 2 bits; of 0 bits, the rows
  const uint8_t *low, *scale;  // halves, not aligned: [width], or by token [tokens]
  int bits;
  bool by_token;
  size_t block;  // of channels that are transformed together; 1 for none
  size_t tokens, width;
  bool half;  // out is of halves, else of floats
  void* out;  // [tokens][width]
};

enum Activation { kSilu, kGelu, kGeluTanh, kRelu };

// Options of sampling (see jaxllm.sampling): a top_k of 0, a top_p of 1 and a min_p of 0 keep all tokens.
struct Draw {
  float temperature, top_p, min_p;
  int32_t top_k;
};

struct Backend {
  const char* name;
  // x [length of all inputs] -> one row of Activations. `scale`, the sums and `outliers`, which may be null,
  // point at the row's own. With a `step` above 0 that is the scale of all spans, there are no outliers, and
  // what lies beyond 127 steps is clipped: its places in `beyond` [length of all inputs], unless that is
  // null, become 1, and all others stay as they are.
  void (*quantize)(const float* x, const Inputs&, float step, int8_t* q, float* scale, int32_t* span_sum,
                   int32_t* block_sum, Outliers* outliers, uint8_t* beyond);
  // Returns what all of x was multiplied with besides the scale.
  float (*rms_norm)(const float* x, const float* scale, float eps, size_t width, float* out);
  // One row: outputs of panels [from, to), to y[0...] (16 floats per panel).
  void (*row_panels)(const Matrix&, const Activations&, size_t from, size_t to, float* y);
  // One row: what one span of inputs gives panels [from, to), before its scales, and what its outliers give
  // besides; and from those of all spans, [all_spans][panels * 16], all outputs, y [panels * 16].
  void (*row_span)(const Matrix&, const Activations&, size_t span, size_t from, size_t to, float* y,
                   float* high);
  void (*join_spans)(const Matrix&, const Activations&, const float* parts, const float* high, float* y);
  // Rows [from, to), at most kTaskRows of them, of at most kTaskPanels panels from `panel` on: out
  // [rows][kTaskPanels * 16]. Scratch: kTaskScratchBytes.
  void (*tile)(const Matrix&, const Activations&, size_t from, size_t to, size_t panel, size_t panels,
               float* out, void* scratch);
  // The same, in whole numbers: out int32, weights of 8 bits, scales and spans left aside.
  void (*tile_int32)(const Matrix&, const Activations&, size_t from, size_t to, size_t panel, size_t panels,
                     int32_t* out, void* scratch);
  // sums[r] = x [width] times row r of a [rank][stride].
  void (*low_sums)(const float* x, const float* a, size_t stride, size_t rank, size_t width, float* sums);
  // Row i of y [rows][y_stride] += row i of low [rows][low_stride] times a [rank][stride], `width` columns.
  void (*add_low)(const float* low, size_t low_stride, size_t rows, const float* a, size_t stride,
                  size_t rank, size_t width, float* y, size_t y_stride);
  // y [count] = halves as floats.
  void (*floats_of)(const uint16_t* halves, size_t count, float* y);
  // gate = activation(gate) * up, or activation(gate) without up.
  void (*activate)(float* gate, const float* up, size_t count, int activation);
  void (*attend)(const Attention&, const AttentionTile&);
  // The same for tokens of a tree, each to the bit as `attend` alone gives it behind its path.
  void (*attend_tree)(const Attention&, const AttentionTile&);
  // Adds what the rows of an attended tile attend to its keys to mass [keys, in whole blocks], each row's
  // weights against its `top` times its factor: those that are not above 0 add nothing. Reads whole vectors
  // of factors and of `top`.
  void (*add_mass)(const AttentionTile&, size_t rows, const float* factors, float* mass);
  // Turns a row of `width` if cos is not null, and stores it as half or float. Scratch: padded_width floats.
  void (*store_row)(const float* x, size_t width, const float* cos, const float* sin, size_t rotary,
                    bool half, void* out, float* scratch);
  // Row `row` of a weight whose units are outputs, as floats.
  void (*unit_row)(const Matrix&, size_t row, float* out);
  // The first index of the largest number, or of the first NaN.
  int32_t (*largest)(const float* x, size_t count);
  // See sampling.inl.
  int32_t (*draw)(const float* x, size_t count, const Draw& how, const uint32_t* key, uint64_t first,
                  uint32_t* keys, float* weights);
  int64_t (*read)(const void* data, size_t bytes);
  // Other threads see its rows after `stream_fence`, which takes as long as many rows.
  void (*load_chunk)(const Chunk&, float* scratch);
  void (*stream_fence)();
  // Causal attention: out like q, and what the backward pass needs besides. Scratch: document_scratch.
  void (*attend_document)(const Document&, float* out, float* lse, float* scratch);
  // From what reaches `out`, like q, what reaches q, k and v. Scratch: document_gradients_scratch.
  void (*attend_document_back)(const Document&, const float* out, const float* lse, const float* dout,
                               float* dq, float* dk, float* dv, float* scratch);
};

// Quarter-rows of a span's panels, and their group scales and minima as floats.
constexpr size_t kTaskScratchBytes =
    kTaskPanels * (kSpanBlocks * kBlock * kPanel + 2 * kSpanBlocks * kPanel * 4) + 64;

inline size_t padded_width(size_t width) { return (width + kPanel - 1) / kPanel * kPanel; }
// Floats that `load_chunk` works in.
inline size_t chunk_scratch(size_t width) { return 4 * padded_width(width); }
constexpr size_t kKeyBlock = 64;
constexpr size_t kAttentionRows = 256;  // of queries (tokens x group) in a tile, unless one token has more
constexpr size_t kCodedRows = 4;        // of queries that are multiplied with coded keys together
inline size_t attention_scratch(size_t rows, size_t width) {
  const size_t wide = padded_width(width);
  // Queries as they are and transformed, scores, keys and values; scales of a chunk and queries times them.
  return rows * (2 * wide + kKeyBlock) + 2 * kKeyBlock * wide + (2 + kCodedRows) * wide + 2 * kKeyBlock;
}

// Of queries in a tile of a document, unless one token has more: a tile, a block of keys and what is between
// them fit the second-level cache many times, the parts in use at once nearly the first.
constexpr size_t kDocumentRows = 48;
inline size_t document_tile(size_t group) { return group < kDocumentRows ? kDocumentRows / group : 1; }
// The most rows of a tile, with what fills its last strip.
inline size_t document_rows(size_t group) { return (document_tile(group) * group + 15) / 16 * 16; }
// Floats of scratch for one kv head of a document.
inline size_t document_scratch(size_t tokens, size_t group, size_t width) {
  const size_t wide = padded_width(width), padded = (tokens + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
  return padded * (width + wide) + document_rows(group) * (2 * wide + kKeyBlock + 17);
}
inline size_t document_gradients_scratch(size_t tokens, size_t group, size_t width) {
  const size_t wide = padded_width(width), padded = (tokens + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
  return padded * (2 * width + 3 * wide) + document_rows(group) * (3 * wide + 2 * kKeyBlock + 1);
}

// Null where they were not built. Constants: a processor that lacks the instructions may read these too.
extern const Backend* const avx512_backend;
extern const Backend* const amx_backend;
extern const Backend* const avxvnni_backend;
extern const Backend* const avx2_backend;
extern const Backend* const i8mm_backend;
extern const Backend* const neon_backend;
extern const Backend* const portable_backend;

}  // namespace jaxllm
