// Exponentials and the non-linearities of a feed-forward block: part of compute.inl.

// Within 2 units in the last place; 0 below -87, NaN for NaN.
ALWAYS_INLINE F exponential(F x) {
  x = fmin(fset(88.0f), fmax(fset(-87.0f), x));
  const I n = round_to_int(fmul(x, fset(1.44269504f)));
  const F whole = to_float(n);
  F r = fma(whole, fset(-0.693359375f), x);
  r = fma(whole, fset(2.12194440e-4f), r);
  F p = fset(1.9875691500e-4f);
  p = fma(p, r, fset(1.3981999507e-3f));
  p = fma(p, r, fset(8.3334519073e-3f));
  p = fma(p, r, fset(4.1665795894e-2f));
  p = fma(p, r, fset(1.6666665459e-1f));
  p = fma(p, r, fset(0.5f));
  p = fma(fmul(p, r), r, fadd(r, fset(1.0f)));
  return fmul(p, pow2(n));
}

ALWAYS_INLINE F logistic(F x) { return fdiv(fset(1.0f), fadd(fset(1.0f), exponential(fsub(fzero(), x)))); }

ALWAYS_INLINE F tanh_of(F x) {
  // 1 - 2 / (e^2x + 1) loses digits near zero, where the series has them.
  const F far = fsub(fset(1.0f), fdiv(fset(2.0f), fadd(exponential(fadd(x, x)), fset(1.0f))));
  return far;
}

// erf by Abramowitz and Stegun 7.1.26 (error under 1.5e-7).
ALWAYS_INLINE F erf_of(F x) {
  const F a = fmax(x, fsub(fzero(), x));
  const F t = fdiv(fset(1.0f), fma(fset(0.3275911f), a, fset(1.0f)));
  F p = fset(1.061405429f);
  p = fma(p, t, fset(-1.453152027f));
  p = fma(p, t, fset(1.421413741f));
  p = fma(p, t, fset(-0.284496736f));
  p = fma(p, t, fset(0.254829592f));
  const F tail = fmul(fmul(p, t), exponential(fsub(fzero(), fmul(a, a))));
  const F y = fsub(fset(1.0f), tail);
  // The sign of x: y * x / |x|, and 0 at 0.
  return fmul(y, fdiv(x, fmax(a, fset(kTiny))));
}

ALWAYS_INLINE F activated(F x, int activation) {
  switch (activation) {
    case kSilu:
      return fmul(x, logistic(x));
    case kGelu:
      return fmul(fmul(fset(0.5f), x), fadd(fset(1.0f), erf_of(fmul(x, fset(0.70710678f)))));
    case kGeluTanh: {
      const F cubic = fmul(fmul(x, x), x);
      const F inner = fmul(fset(0.79788456f), fma(fset(0.044715f), cubic, x));
      return fmul(x, logistic(fadd(inner, inner)));  // (1 + tanh u) / 2 is logistic(2u)
    }
    default:
      return fmax(fzero(), x);
  }
}

void activate(float* gate, const float* up, size_t count, int activation) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const F y = activated(fload(gate + i), activation);
    fstore(gate + i, up ? fmul(y, fload(up + i)) : y);
  }
  if (i < count) {
    float tail[16] = {}, other[16] = {};
    memcpy(tail, gate + i, (count - i) * sizeof(float));
    if (up) memcpy(other, up + i, (count - i) * sizeof(float));
    const F y = activated(fload(tail), activation);
    fstore(tail, up ? fmul(y, fload(other)) : y);
    memcpy(gate + i, tail, (count - i) * sizeof(float));
  }
}
