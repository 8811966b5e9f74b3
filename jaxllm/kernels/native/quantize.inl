// Activations as 8-bit numbers, and the norm before them: part of compute.inl.

ALWAYS_INLINE float of_bits(int32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
ALWAYS_INLINE int32_t magnitude_bits(float x) {
  int32_t bits;
  memcpy(&bits, &x, 4);
  return bits & 0x7fffffff;
}

// The largest magnitudes of a span, kOutliers and one more, descending, as bits.
struct Largest {
  int32_t bits[kOutliers + 1] = {};
  ALWAYS_INLINE void add(int32_t each) {
    UNROLL for (int i = 0; i <= kOutliers; i++) {
      const int32_t larger = each > bits[i] ? each : bits[i];
      each = each > bits[i] ? bits[i] : each;
      bits[i] = larger;
    }
  }
};

// One span of `count` inputs (a multiple of 16) that starts at x; returns the bits of the largest magnitude.
// With outliers the largest of the others has 127 steps.
int32_t quantize_span(const float* x, size_t count, float step, int8_t* q, float* scale, int32_t* span_sum,
                      int32_t* block_sum, Outliers* outliers) {
  I top = izero();
  const I magnitude = iset(0x7fffffff);
  for (size_t i = 0; i < count; i += 16) top = imax(top, iand(iload(x + i), magnitude));
  const int32_t bits = itop(top);
  float amax = of_bits(bits);
  const bool finite = bits < 0x7f800000;
  const bool some = finite && amax >= kTiny;
  uint16_t beyond[kSpan];
  size_t beyond_count = 0;
  int32_t limit = bits;
  if (outliers) {
    *outliers = {};
    if (some) {
      int32_t lanes[16], larger[16] = {}, least = 0;
      istore(lanes, top);
      for (int i = 0; i < 16; i++) {
        for (int j = 0; j < 16; j++) larger[j] += lanes[i] > lanes[j];
      }
      for (int j = 0; j < 16; j++) least = larger[j] >= kOutliers && lanes[j] > least ? lanes[j] : least;
      // All that are larger, at least the outliers, are among these.
      const I lowest = iset(least);
      for (size_t i = 0; i < count; i += 16) {
        for (uint32_t found = ilarger(iand(iload(x + i), magnitude), lowest); found; found &= found - 1)
          beyond[beyond_count++] = static_cast<uint16_t>(i + static_cast<size_t>(__builtin_ctz(found)));
      }
      Largest found;
      found.add(least);
      for (size_t i = 0; i < beyond_count; i++) found.add(magnitude_bits(x[beyond[i]]));
      // A high part is in -127..127.
      const float narrowest = amax / kOutlierSteps;
      amax = of_bits(found.bits[kOutliers]);
      amax = amax < narrowest ? narrowest : amax;
      limit = magnitude_bits(amax);
    }
  }
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
  if (limit < bits) {
    const float steps = 127.0f / amax;
    int entries = 0;
    for (size_t k = 0; k < beyond_count; k++) {
      const size_t i = beyond[k];
      if (magnitude_bits(x[i]) <= limit) continue;
      const float value = x[i] * steps;
      const int32_t level = static_cast<int32_t>(value + (value < 0 ? -0.5f : 0.5f));
      const int32_t high = (level + (level < 0 ? -kOutlierSteps : kOutlierSteps) / 2) / kOutlierSteps;
      const int32_t low = level - high * kOutlierSteps;
      block_sum[i / kBlock] += low - q[i];
      total += low - q[i];
      q[i] = static_cast<int8_t>(low);
      int entry = 0;
      while (entry < entries && outliers->quarter[entry] != i / 4) entry++;
      if (entry == entries) entries++;
      outliers->quarter[entry] = static_cast<uint8_t>(i / 4);
      outliers->high[entry][i % 4] = static_cast<int8_t>(high);
      outliers->sum[entry] = static_cast<int16_t>(outliers->sum[entry] + high);
    }
    outliers->some = true;
  }
  *span_sum = total;
  return bits;
}

void quantize(const float* x, const Inputs& inputs, float step, int8_t* q, float* scale, int32_t* span_sum,
              int32_t* block_sum, Outliers* outliers, uint8_t* beyond) {
  const float top = 127.0f * step;
  int32_t top_bits;
  memcpy(&top_bits, &top, 4);
  for (size_t segment = 0; segment < inputs.segments; segment++) {
    for (size_t at = 0; at < inputs.length; at += kSpan) {
      const size_t left = inputs.length - at, count = left < kSpan ? left : kSpan;
      int32_t largest_bits;
      if (count % kBlock == 0) {
        largest_bits = quantize_span(x + at, count, step, q, scale, span_sum, block_sum, outliers);
        q += count;
      } else {
        float padded[kSpan];
        const size_t whole = (count + kBlock - 1) / kBlock * kBlock;
        memcpy(padded, x + at, count * sizeof(float));
        memset(padded + count, 0, (whole - count) * sizeof(float));
        largest_bits = quantize_span(padded, whole, step, q, scale, span_sum, block_sum, outliers);
        q += whole;
      }
      if (beyond && largest_bits > top_bits) {
        for (size_t i = at; i < at + count; i++) beyond[i] |= __builtin_fabsf(x[i]) > top;
      }
      scale++, span_sum++;
      if (outliers) outliers++;
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
