// Rows of activations as products take them: in 8 bits, what adapters make of them as they were, and what a
// step clips off them.
#pragma once
#include "ops.h"

namespace jaxllm {

// One side of an adapter, [rank][stride], which rows are multiplied with before the product.
struct Low {
  const float* side;
  size_t rank, stride;
};

// What lies beyond 127 steps, in the channels where anything does.
struct Excess {
  const int32_t* place;      // see Step
  const uint32_t* channels;  // [count], ascending
  size_t count;
  const float* compact;  // [rows][count]
};

struct Prepared {
  Activations a;
  float* low;  // [rows][low_stride]
  size_t low_stride;
  Excess excess;
};

// Quantizes rows of x, which begin `x_stride` apart, after a norm if there is one, into the caller's scratch;
// the next call of the same thread overwrites it. False when memory has run out.
bool prepare_rows(const float* x, size_t x_stride, size_t rows, const Inputs& in, Norm norm, const Step& step,
                  const Low* lows, size_t low_count, Prepared& prepared);

// What is left to do besides the product of whole numbers: low [rows][low_stride] times the other side of an
// adapter, and the excess times the rows of its channels, are added to results.
struct Change {
  const float* low;
  size_t low_stride;
  const float* side;  // [rank][stride]
  size_t rank, stride;
  Excess excess;
  FloatRows floats;
  const Matrix* weight;

  // To y [rows][y_stride], which are results of row `row`... and column `column`... (of a panel's begin),
  // `width` of them, at most a task's. Work: kTaskScratchBytes, for excess alone.
  void add(size_t row, size_t rows, size_t column, size_t width, float* y, size_t y_stride, void* work) const;
};

// Makes zero what each row of x [rows][width] has behind the first used[row * stride], which changes neither
// the row's scales nor sums over it.
void leave_out(float* x, size_t rows, size_t width, const int32_t* used, size_t stride);

}  // namespace jaxllm
