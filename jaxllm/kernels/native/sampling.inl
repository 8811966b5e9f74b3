// Where a step ends, choosing tokens: part of compute.inl.

// Whole numbers in the order of the floats, NaN above all; both zeros are 0.
ALWAYS_INLINE int32_t order_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, 4);
  const int32_t magnitude = bits & 0x7fffffff;
  const int32_t ordered = bits < 0 ? -magnitude : magnitude;
  return magnitude > 0x7f800000 ? 0x7fffffff : ordered;
}

// The first index of the largest number, or of the first NaN.
int32_t largest(const float* x, size_t count) {
  constexpr size_t kTogether = 256;
  int32_t top = -0x7fffffff - 1;
  size_t where = 0;
  for (size_t at = 0; at < count; at += kTogether) {
    const size_t end = count - at < kTogether ? count : at + kTogether;
    int32_t here = -0x7fffffff - 1;
    for (size_t i = at; i < end; i++) {
      const int32_t each = order_of(x[i]);
      here = each > here ? each : here;
    }
    if (here > top) {
      top = here;
      where = at;
    }
  }
  while (where < count && order_of(x[where]) != top) where++;
  return static_cast<int32_t>(where);
}

// Unsigned numbers in the order of the floats, by their bits: -0 is below 0, a NaN beyond the infinity of its
// sign.
ALWAYS_INLINE uint32_t key_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

ALWAYS_INLINE float float_of(uint32_t key) {
  const uint32_t bits = key >> 31 ? key & 0x7fffffff : ~key;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// A logit relative to the largest, by the temperature.
ALWAYS_INLINE float scaled(float x, float most, float temperature) { return (x - most) / temperature; }

// Not kBlock, which is of inputs.
constexpr size_t kLogitsTogether = 256;

// Writes the keys of scaled logits that are at least `least`; returns their number.
size_t collect(const float* x, size_t count, float most, float temperature, uint32_t least, uint32_t* keys) {
  size_t n = 0;
  for (size_t at = 0; at < count; at += kLogitsTogether) {
    const size_t length = count - at < kLogitsTogether ? count - at : kLogitsTogether;
    uint32_t here[kLogitsTogether], hits = 0;
    for (size_t i = 0; i < length; i++) {
      here[i] = key_of(scaled(x[at + i], most, temperature));
      hits += here[i] >= least;
    }
    if (hits == 0) continue;
    for (size_t i = 0; i < length; i++) {
      keys[n] = here[i];
      n += here[i] >= least;
    }
  }
  return n;
}

// The sum of the exponentials of numbers, which `at` gives sixteen of from an index on; y gets each.
template <class At>
ALWAYS_INLINE double sum_of_exponentials(size_t count, float* y, At at) {
  constexpr size_t kTogether = 4096;
  double sum = 0;
  for (size_t from = 0; from < count; from += kTogether) {
    const size_t end = count - from < kTogether ? count : from + kTogether;
    F here = fzero();
    for (size_t i = from; i < end; i += 16) {
      float few[16];
      for (size_t j = 0; j < 16; j++) few[j] = i + j < end ? at(i + j) : -1e30f;
      const F each = exponential(fload(few));
      fstore(few, each);
      for (size_t j = 0; y && j < 16 && i + j < end; j++) y[i + j] = few[j];
      here = fadd(here, each);
    }
    sum += static_cast<double>(fsum(here));
  }
  return sum;
}

// The highest key for which the weights of all keys from it on sum to at least `wanted`; 0 if all sum to
// less. Without weights each counts 1. It is found digit by digit, from the highest.
uint32_t threshold(const uint32_t* keys, const float* weights, size_t count, double wanted) {
  uint32_t found = 0, known = 0;
  double above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    double sums[256] = {};
    for (size_t i = 0; i < count; i++) {
      if ((keys[i] & known) == found)
        sums[keys[i] >> shift & 255] += weights ? static_cast<double>(weights[i]) : 1.0;
    }
    uint32_t digit = 255;
    while (digit > 0 && above + sums[digit] < wanted) above += sums[digit--];
    found |= digit << shift;
    known |= 255u << shift;
  }
  return found;
}

// The least key that top-k and top-p keep; keys and weights [count] are scratch space.
uint32_t filter(const float* x, size_t count, float most, const Draw& how, uint32_t* keys, float* weights) {
  const bool some = how.top_k > 0 && static_cast<size_t>(how.top_k) < count, share = how.top_p < 1;
  if (!some && !share) return 0;
  const float t = how.temperature;
  double whole = 0;
  if (share && !some)
    whole = sum_of_exponentials(count, nullptr, [&](size_t i) { return scaled(x[i], most, t); });
  // Few tokens have nearly all of the probability: the others are looked at if that is not so.
  const uint32_t attempts[2] = {key_of(-12.0f), 0};
  for (const uint32_t from : attempts) {
    const size_t n = collect(x, count, most, t, from, keys);
    if (some && n < static_cast<size_t>(how.top_k)) continue;
    uint32_t least = some ? threshold(keys, nullptr, n, how.top_k) : from;
    if (!share) return least;
    const double sum = sum_of_exponentials(
        n, weights, [&](size_t i) { return keys[i] >= least ? float_of(keys[i]) : -1e30f; });
    const double wanted = static_cast<double>(how.top_p) * (some ? sum : whole);
    if (sum < wanted && from) continue;
    const uint32_t from_p = threshold(keys, weights, n, wanted);
    return from_p > least ? from_p : least;
  }
  return 0;
}

// Random bits by Threefry-2x32 (Salmon et al. 2011, 20 rounds): of the block of an index, both halves
// combined, as `jax.random.bits` gives them.
ALWAYS_INLINE uint32_t random_bits(const uint32_t* key, uint64_t index) {
  uint32_t high = static_cast<uint32_t>(index >> 32), low = static_cast<uint32_t>(index);
  threefry(key, high, low);
  return high ^ low;
}

// 23 of the bits as a number in [0, 1).
ALWAYS_INLINE float uniform_of(uint32_t bits) {
  const uint32_t one_to_two = bits >> 9 | 0x3f800000;
  float x;
  memcpy(&x, &one_to_two, 4);
  return x - 1.0f;
}

// Gumbel noise from a number in [0, 1), and a bound that is at least as much and takes no logarithm: 1 - x is
// at most -log(x), and no less than the power of two below it.
ALWAYS_INLINE float gumbel(float x) { return -logf(-logf(x < FLT_MIN ? FLT_MIN : x)); }
ALWAYS_INLINE float gumbel_bound(float x) {
  const float rest = 1.0f - x;
  uint32_t bits;
  memcpy(&bits, &rest, 4);
  return static_cast<float>(127 - static_cast<int32_t>(bits >> 23)) * 0.6931472f + 1e-3f;
}
// More than any noise.
constexpr float kMostNoise = 16.0f;

// A token sampled from logits x [count]: the largest after filters and noise, whose random numbers are those
// from index `first` on; -1 if the largest logit is not finite.
int32_t draw(const float* x, size_t count, const Draw& how, const uint32_t* key, uint64_t first,
             uint32_t* keys, float* weights) {
  const int32_t top = largest(x, count);
  const float most = x[top];
  uint32_t bits;
  memcpy(&bits, &most, 4);
  if ((bits & 0x7f800000) == 0x7f800000) return -1;
  int32_t token = top;
  float best = gumbel(uniform_of(random_bits(key, first + static_cast<uint64_t>(top))));
  uint32_t least = filter(x, count, most, how, keys, weights);
  if (how.min_p > 0) {
    const uint32_t floor = key_of(logf(how.min_p));
    least = floor > least ? floor : least;
  }
  for (size_t at = 0; at < count; at += kLogitsTogether) {
    const size_t length = count - at < kLogitsTogether ? count - at : kLogitsTogether;
    // What no noise lifts above the best.
    const uint32_t hopeless = key_of(best - kMostNoise);
    const uint32_t from = hopeless > least ? hopeless : least;
    uint32_t here[kLogitsTogether], hits = 0;
    for (size_t i = 0; i < length; i++) {
      here[i] = key_of(scaled(x[at + i], most, how.temperature));
      hits += here[i] >= from;
    }
    if (hits == 0) continue;
    uint32_t random[kLogitsTogether];
    const bool many = hits > kLogitsTogether / 16;
    for (size_t i = 0; many && i < length; i++) random[i] = random_bits(key, first + at + i);
    for (size_t i = 0; i < length; i++) {
      if (here[i] < from) continue;
      const float x01 = uniform_of(many ? random[i] : random_bits(key, first + at + i));
      const float y = float_of(here[i]);
      if (y + gumbel_bound(x01) < best) continue;
      const float score = y + gumbel(x01);
      const int32_t index = static_cast<int32_t>(at + i);
      if (score > best || (score == best && index < token)) {
        best = score;
        token = index;
      }
    }
  }
  return token;
}
