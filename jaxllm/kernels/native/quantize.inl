// Activations as 8-bit numbers, and the norm before them: part of compute.inl.

// One span of `count` inputs (a multiple of 16) that starts at x; returns the bits of the largest magnitude.
int32_t quantize_span(const float* x, size_t count, float step, int8_t* q, float* scale, int32_t* span_sum,
                      int32_t* block_sum) {
  I top = izero();
  const I magnitude = iset(0x7fffffff);
  for (size_t i = 0; i < count; i += 16) top = imax(top, iand(iload(x + i), magnitude));
  const int32_t bits = itop(top);
  float amax;
  memcpy(&amax, &bits, 4);
  const bool finite = bits < 0x7f800000;
  const bool some = finite && amax >= kTiny;
  const F factor = fset(step > 0 ? 1.0f / step : some ? 127.0f / amax : 0.0f);
  const F lowest = fset(-127.0f), highest = fset(127.0f);
  const uint32_t nan_bits = 0x7fc00000u;
  float nan;
  memcpy(&nan, &nan_bits, 4);
  *scale = finite ? (step > 0 ? step : some ? amax / 127.0f : 0.0f) : nan;
  int32_t total = 0;
  for (size_t block = 0; block < count; block += kBlock) {
    I sum = izero();
    for (size_t i = block; i < block + kBlock && i < count; i += 16) {
      const F steps = fmul(fload(x + i), factor);
      const I value = some ? round_to_int(fmin(fmax(steps, lowest), highest)) : izero();
      store_bytes(q + i, value);
      sum = iadd(sum, value);
    }
    block_sum[block / kBlock] = isum(sum);
    total += block_sum[block / kBlock];
  }
  *span_sum = total;
  return bits;
}

void quantize(const float* x, const Inputs& inputs, float step, int8_t* q, float* scale, int32_t* span_sum,
              int32_t* block_sum, uint8_t* beyond) {
  const float top = 127.0f * step;
  int32_t top_bits;
  memcpy(&top_bits, &top, 4);
  for (size_t segment = 0; segment < inputs.segments; segment++) {
    for (size_t at = 0; at < inputs.length; at += kSpan) {
      const size_t left = inputs.length - at, count = left < kSpan ? left : kSpan;
      int32_t largest_bits;
      if (count % kBlock == 0) {
        largest_bits = quantize_span(x + at, count, step, q, scale, span_sum, block_sum);
        q += count;
      } else {
        float padded[kSpan];
        const size_t whole = (count + kBlock - 1) / kBlock * kBlock;
        memcpy(padded, x + at, count * sizeof(float));
        memset(padded + count, 0, (whole - count) * sizeof(float));
        largest_bits = quantize_span(padded, whole, step, q, scale, span_sum, block_sum);
        q += whole;
      }
      if (beyond && largest_bits > top_bits) {
        for (size_t i = at; i < at + count; i++) beyond[i] |= __builtin_fabsf(x[i]) > top;
      }
      scale++, span_sum++;
      block_sum += (count + kBlock - 1) / kBlock;
    }
    x += inputs.length;
    if (beyond) beyond += inputs.length;
  }
}

float rms_norm(const float* x, const float* scale, float eps, size_t width, float* out) {
  F squares = fzero();
  size_t i = 0;
  for (; i + 16 <= width; i += 16) squares = fma(fload(x + i), fload(x + i), squares);
  float sum = fsum(squares);
  for (size_t j = i; j < width; j++) sum += x[j] * x[j];
  const float factor = 1.0f / __builtin_sqrtf(sum / static_cast<float>(width) + eps);
  const F lanes = fset(factor);
  for (i = 0; i + 16 <= width; i += 16) fstore(out + i, fmul(fmul(fload(x + i), lanes), fload(scale + i)));
  for (; i < width; i++) out[i] = x[i] * factor * scale[i];
  return factor;
}
