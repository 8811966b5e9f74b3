// The operations: kernels spread over the pool's threads. Nothing here knows XLA.
#pragma once
#include "backend.h"

namespace jaxllm {

// The fastest kernels that this processor runs, unless `use_backend` chose others.
const Backend& backend();
// Chooses by name ("" for the fastest); false when there are none of that name here.
bool use_backend(const char* name);
// Names of all that this processor runs, or of all that were `built`, fastest first; returns how many.
int backends(const char* (&names)[8], bool built = false);

// From this many rows on, widening weights costs less than it saves (see Matrix). Of the rows of a step's
// shape, however many of them are computed: so a token gives the same bits however full its chunk is.
constexpr size_t kWidenedRows = 16;

// How a weight is stored; see Matrix.
struct Stored {
  const void *data, *low, *scale;
  int bits, group;
  bool nested, minima;
};
// A weight whose units are outputs, [panels][blocks] blocks, of which the first `outputs` rows are used.
struct Units {
  Stored stored;
  size_t panels, inputs;  // as stored
  bool widen;             // see Matrix
};
// A weight whose units are inputs, [segments][blocks][panels] blocks.
struct Reduction {
  Stored stored;
  size_t segments, blocks, panels, groups;  // as stored; blocks and groups of a segment
  bool widen;                               // see Matrix
};

// A low-rank change to a weight (LoRA): left * right is added to it, in floats. Rank 0 is none.
struct Adapter {
  const float* left;   // [rank][stride], along units
  const float* right;  // [rank][width], along the weight's other side
  size_t rank, stride;
};

// Rows of a weight in halves, [count][stride], along its outputs.
struct FloatRows {
  const uint16_t* data;
  size_t count, stride;
};

// How activations are quantized: in steps of one size, or with scales of their own (0). With `channels` what
// lies beyond 127 steps is multiplied in floats, with weights of 8 bits alone that have a scale per output.
struct Step {
  float size;
  const int32_t*
      place;           // [inputs]: of each input its row in the weights' FloatRows, or none: the weight's own
  int32_t* channels;   // how many inputs lie beyond in some row; null for no such product
  bool plain = false;  // with scales of their own, and no outliers
};

// What is done to the rows of x before a product: nothing, or a root-mean-square norm.
struct Norm {
  const float* scale;  // [width], or null
  float eps;
};

// y [rows][width] = residual + norm(x), like it.
void add_normed(const float* x, size_t rows, size_t width, Norm norm, const float* residual, float* y);

// Results: null, or what went wrong (out of memory is all that can).
using Failure = const char*;
constexpr Failure kNoMemory = "out of memory for a kernel's scratch";

// Outputs of a weight: the first `outputs` of each row of y [rows][stride]; the others are left as they are.
struct Outputs {
  Units weight;
  Adapter adapter;
  size_t outputs, stride;
  float* y;
  FloatRows floats;
};
// y = norm(x) [rows][inputs] times the first rows of each weight.
Failure to_units(const float* x, size_t rows, Norm norm, const Step& step, const Outputs* results,
                 size_t count);
// y [rows][outputs] = residual + h times the first rows of each segment, where the rows of h begin `stride`
// apart, with segments * length inputs.
Failure from_units(const float* h, size_t rows, size_t stride, const Step& step, const Reduction& weight,
                   const Adapter& adapter, const FloatRows& floats, size_t segments, size_t length,
                   size_t outputs, const float* residual, float* y);
// The three weights of a block and what is changed of each; without a gate, its data is null.
struct Block {
  Units gate, up;
  Reduction down;
  Adapter gate_adapter, up_adapter, down_adapter;
  FloatRows gate_floats, up_floats, down_floats;
  // Of the units that each row [rows] uses the number, `unit_stride` apart; null where all rows use all.
  const int32_t* row_units = nullptr;
  size_t unit_stride = 0;
  // Of one row and a nested, gated block what the high planes of gate and up give, [2][panels][groups][16]:
  // filled alone first, then finished by the low planes; null where all is there.
  int32_t* early = nullptr;
  bool finishing = false;
};
// What the inputs of a block's products are quantized by, those of `down` by `hidden`.
struct Steps {
  Step in, hidden;
};
// y [rows][width] = (x if residual) + down(activation(gate(norm(x))) * up(norm(x))), `units` of them; without
// a gate down(activation(up(norm(x)))).
Failure feed_forward(const float* x, size_t rows, size_t width, Norm norm, const Steps& steps,
                     const Block& block, size_t units, int activation, bool residual, float* y);
// Whom each row of norm(x) [rows][width] visits, by a router [experts][width]: the `choices` most probable of
// a softmax of the logits [rows][experts], with their probabilities as weights [rows][choices], which sum to
// one if `normalized`. To logits `bias` [experts] is added, unless it is null.
Failure route(const float* x, size_t rows, size_t width, Norm norm, const float* router, const float* bias,
              size_t experts, size_t choices, bool normalized, float* logits, float* weights, int32_t* ids);
// Some rows of x through one expert, to as many of y from `start` on.
struct Tile {
  const int32_t* tokens;  // [rows], of x
  size_t rows, expert, start;
};
// y [...][width] = what each tile's expert makes of norm(x) [...][width] at its rows, as `feed_forward` does.
Failure visit_experts(const float* x, size_t width, Norm norm, const Tile* tiles, size_t count,
                      const Block* experts, size_t units, int activation, float* y);
// y [rows][width] = residual (or zeros) and, one after the other, the visits at places [rows][choices] times
// their weights.
void sum_visits(const float* visits, size_t width, const int32_t* places, const float* weights, size_t rows,
                size_t choices, const float* residual, float* y);
// y [rows][outputs] int32 = x [rows][inputs] int8 times 8-bit rows, scales left aside. -128 counts as -127.
Failure integer_product(const int8_t* x, size_t rows, const Units& weight, size_t outputs, int32_t* y);

// y [count][inputs] = rows of a weight, one per index; an index beyond its `outputs` counts as the last.
void unit_rows(const int32_t* index, size_t count, const Units& weight, size_t outputs, float* y);
// y [rows] = where each row of x [rows][width] is largest first; a NaN is larger than any number.
void largest(const float* x, size_t rows, size_t width, int32_t* y);
// y [rows] = a token of each row of logits x [rows][width]: the largest after filters and noise, of equals
// the first, as `jaxllm.sampling` has them; -1 for a row whose largest is not finite.
void draw(const float* x, size_t rows, size_t width, const Draw& how, const uint32_t* seed, uint32_t drawn,
          int32_t* y);

struct AttentionShape {
  size_t batch, tokens, kv_heads, group, width, capacity;
  size_t used_heads;         // of the kv_heads, the first that are written and attended to
  size_t rotary;             // half the dimensions that turn; 0 for none
  const int32_t* rows;       // [tokens] of the cache where new tokens are written, ascending
  const int32_t* positions;  // [tokens] in their sequence, which windows are of
  size_t valid;              // how many of them are written
  // A token sees the rows up to its own. Of a tree it sees those before `base`, and of the `nodes` behind
  // them what `seen` [tokens][nodes] says; null for none.
  const uint8_t* seen;
  size_t base, nodes;
  size_t window;
  float scale, softcap;
  bool half;
  bool by_node;  // the mass is counted for each node of a tree, not for all tokens together
  // [kv_heads][group][distances], what is added to the scores of a head by how far before its query a key
  // stands: the last entry for the query's own place, the first for all that are farther than the others.
  // Null for nothing; not together with `softcap`.
  const float* bias = nullptr;
  size_t distances = 0;
  // [kv_heads][group], logits that are in the denominator of a head's softmax and attend to nothing; null for
  // none.
  const float* sink_logits = nullptr;
  // Tokens before the cache's, of one sequence: rows, positions and `base` count from the first of them.
  CodedChunks chunks = {};
  float* chunk_mass = nullptr;  // [masses], or by_node [1 + tokens][masses]: what each chunk's tokens got
  size_t masses = 0;
  // Behind the last row that there is.
  size_t end() const { return chunks.tokens + capacity; }
};
// Turns new keys by cos and sin [tokens][rotary], writes them and new values into the cache, and attends.
// q, y [batch][tokens][kv_heads][group][width]; k, v [batch][tokens][kv_heads][width]; caches
// [batch][kv_heads][capacity][width]. What would lie beyond the capacity is not written, nor is y for heads
// that are not used. Where k is null nothing is written: tokens attend to what the cache has. To `mass`
// [batch][capacity], unless it is null, what the valid tokens' queries attend to each position is added;
// `by_node` to mass [batch][1 + tokens][capacity] what each one's do, to a row of its own behind the first.
Failure attention(const float* q, const float* k, const float* v, const float* cos, const float* sin,
                  void* key_cache, void* value_cache, const AttentionShape& shape, float* y, float* mass);

struct AttentionBuffers {
  const float *q, *k, *v, *cos, *sin;
  char *keys, *values;
  float* y;
};
// The same for one token of each of `count` sequences with caches of their own, without masses, trees and
// chunks; each comes out as alone.
Failure attention_of_rows(const AttentionBuffers* each, const AttentionShape* shapes, size_t count);

// Chunks as bytes, and the caches of layers that they go to, [heads][capacity][width], halves or floats as
// rows of 0 bits.
struct ChunksShape : ChunkForm {
  size_t capacity;
};
struct ChunksLayer {
  const uint8_t* const* blobs;
  size_t kv_heads;  // in the blobs: the first ones of the cache's
  void *keys, *values;
};
// Chunk i of `count` goes to positions [i * tokens, (i + 1) * tokens) of each layer, cut at the capacity,
// from the blob at its blobs[i] with levels of bits[i]: 8, 4, 2, or 0 for rows as the cache holds them. A
// negative width leaves its place alone.
Failure load_chunks(const ChunksLayer* layers, size_t layer_count, const int32_t* bits, size_t count,
                    const ChunksShape& shape);

struct DocumentShape {
  size_t batch, tokens, kv_heads, group, width;
  float scale;
};
// Whether starts [batch][tokens] divide rows into documents: a token's is its own position or that of the
// token before.
bool are_starts(const int32_t* starts, size_t batch, size_t tokens);
// Causal attention inside documents, which `starts` (are_starts) divides rows into. q, out [batch][tokens]
// [kv_heads][group][width]; k, v [batch][tokens][kv_heads][width]; lse [batch][tokens][kv_heads][group], the
// logarithm of the sum of exponentials of a query's scores.
Failure document_attention(const float* q, const float* k, const float* v, const int32_t* starts,
                           const DocumentShape& shape, float* out, float* lse);
// What reaches q, k and v when dout reaches out.
Failure document_attention_gradients(const float* q, const float* k, const float* v, const int32_t* starts,
                                     const float* out, const float* lse, const float* dout,
                                     const DocumentShape& shape, float* dq, float* dk, float* dv);

// Makes bytes zero. Where the system gives zeroed pages on demand, whole pages take no memory until they are
// used.
void zero(void* data, size_t bytes);

// Sum of some bytes, read once by all threads: what memory can deliver.
int64_t read_all(const void* data, size_t bytes);

}  // namespace jaxllm
