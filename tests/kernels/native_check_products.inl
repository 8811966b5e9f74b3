// Products of quantized weights beside their sums in double: part of native_check.cpp.

// What a product must be: sums and how far off they may be, [rows][outputs], with weights as they are stored
// and with wider ones. Each row is the one or the other.
class Expected {
 public:
  Expected(const Weight& w, const std::vector<float>& x, size_t rows, const float* residual)
      : rows_(rows), outputs_(w.outputs) {
    const std::vector<double> seen = rounded(x, rows, w.segments, w.inputs);
    add(w.dense, seen, residual);
    if (!w.wider.empty()) add(w.wider, seen, residual);
  }

  void judge(const float* y) const {
    for (size_t row = 0; row < rows_; row++) {
      if (std::any_of(sums_.begin(), sums_.end(),
                      [&](const Sums& each) { return wrong(each, row, y) == outputs_; }))
        continue;
      const size_t o = wrong(sums_[0], row, y), at = row * outputs_ + o;
      fail("a product is wrong", row, o, y[at], sums_[0].value[at], sums_[0].room[at]);
    }
  }

 private:
  struct Sums {
    std::vector<double> value, room;
  };

  void add(const std::vector<double>& dense, const std::vector<double>& seen, const float* residual) {
    Sums sums{std::vector<double>(rows_ * outputs_), std::vector<double>(rows_ * outputs_)};
    const size_t inputs = dense.size() / outputs_;
    for (size_t row = 0; row < rows_; row++) {
      double *value = &sums.value[row * outputs_], *room = &sums.room[row * outputs_];
      for (size_t i = 0; i < inputs; i++) {
        const double x = seen[row * inputs + i], *w = &dense[i * outputs_];
        for (size_t o = 0; o < outputs_; o++) value[o] += x * w[o], room[o] += fabs(x * w[o]);
      }
      for (size_t o = 0; o < outputs_; o++) {
        const double more = residual ? residual[row * outputs_ + o] : 0;
        value[o] += more;
        room[o] = 1.5e-6 * (room[o] + fabs(more)) + 1e-30;
      }
    }
    sums_.push_back(std::move(sums));
  }

  // The first output of a row that is off; their number if none is.
  size_t wrong(const Sums& sums, size_t row, const float* y) const {
    size_t o = 0;
    while (o < outputs_) {
      const size_t at = row * outputs_ + o;
      if (!(fabs(y[at] - sums.value[at]) <= sums.room[at])) break;
      o++;
    }
    return o;
  }

  size_t rows_, outputs_;
  std::vector<Sums> sums_;
};

void check_to_units(Random& random) {
  const size_t rows = random.rows(), count = random.below(3) + 1, inputs = random.in(1, 600);
  const int bits = random.below(2) ? 8 : 4, group = static_cast<int>(random.below(3)) * 32;
  shape = "to_units rows " + std::to_string(rows) + " inputs " + std::to_string(inputs) + " bits " +
          std::to_string(bits) + " group " + std::to_string(group);
  std::vector<Weight> weights;
  std::vector<Units> units;
  std::vector<size_t> outputs, starts{0};
  for (size_t i = 0; i < count; i++) {
    outputs.push_back(random.in(1, 150));
    shape += " outputs " + std::to_string(outputs[i]);
    weights.push_back(Weight::of_outputs(random, outputs[i], inputs, bits, group));
    starts.push_back(starts[i] + rows * outputs[i]);
  }
  for (const Weight& w : weights)
    units.push_back({w.data.data(), w.scale.data(), bits, group, w.panels, inputs});
  const std::vector<float> values = random.floats(rows * inputs);
  const Buffer<float> x(values);
  // One buffer for each result; compared as one.
  std::vector<Expected> expected;
  for (const Weight& w : weights) expected.emplace_back(w, values, rows, nullptr);
  std::vector<Buffer<float>> results;
  std::vector<float*> pointers;
  for (size_t i = 0; i < count; i++) results.emplace_back(rows * outputs[i]);
  for (Buffer<float>& each : results) pointers.push_back(each.data());
  Buffer<float> y(starts[count]);
  everywhere(
      y,
      [&] {
        must(to_units(x.data(), rows, {nullptr, 0}, units.data(), outputs.data(), pointers.data(), count));
        for (size_t i = 0; i < count; i++) memcpy(y.data() + starts[i], pointers[i], rows * outputs[i] * 4);
      },
      [&] {
        for (size_t i = 0; i < count; i++) expected[i].judge(pointers[i]);
      });
}

void check_from_units(Random& random) {
  const size_t rows = random.rows(), segments = random.below(2) ? 1 : random.in(1, 4),
               outputs = random.in(1, 150);
  const size_t length = random.in(1, segments == 1 ? 600 : 90);
  const int bits = random.below(2) ? 8 : 4, group = static_cast<int>(random.below(3)) * 32;
  shape = "from_units rows " + std::to_string(rows) + " segments " + std::to_string(segments) + " length " +
          std::to_string(length) + " outputs " + std::to_string(outputs) + " bits " + std::to_string(bits) +
          " group " + std::to_string(group);
  const Weight w = Weight::of_inputs(random, segments, length, outputs, bits, group);
  const std::vector<float> values = random.floats(rows * segments * length),
                           more = random.floats(rows * outputs);
  const Buffer<float> h(values), residual(more);
  const float* add = random.below(2) ? residual.data() : nullptr;
  const Reduction reduction{w.data.data(), w.scale.data(), bits, group, segments, w.blocks, w.panels};
  const Expected expected(w, values, rows, add);
  Buffer<float> y(rows * outputs);
  everywhere(
      y, [&] { must(from_units(h.data(), rows, reduction, segments, length, outputs, add, y.data())); },
      [&] { expected.judge(y.data()); });
}

// A block is its parts, to the bit: products, activation, product.
void check_feed_forward(Random& random) {
  const size_t rows = random.rows(), width = random.in(1, 300), units = random.in(1, 300);
  const int bits = random.below(2) ? 8 : 4, group = static_cast<int>(random.below(3)) * 32;
  const int activation = static_cast<int>(random.below(4));
  const bool gated = random.below(2), add = random.below(2);
  shape = "feed_forward rows " + std::to_string(rows) + " width " + std::to_string(width) + " units " +
          std::to_string(units) + " bits " + std::to_string(bits) + " group " + std::to_string(group);
  const Weight gate = Weight::of_outputs(random, units, width, bits, group);
  const Weight up = Weight::of_outputs(random, units, width, bits, group);
  const Weight down = Weight::of_inputs(random, 1, units, width, bits, group);
  const Units both[2] = {{gate.data.data(), gate.scale.data(), bits, group, gate.panels, width},
                         {up.data.data(), up.scale.data(), bits, group, up.panels, width}};
  const Reduction reduction{down.data.data(), down.scale.data(), bits, group, 1, down.blocks, down.panels};
  const Buffer<float> x(random.floats(rows * width)), scale(random.floats(width));
  const Norm norm{random.below(2) ? scale.data() : nullptr, 1e-5f};
  Buffer<float> y(rows * width), expected(rows * width), hidden(rows * units), other(rows * units);
  everywhere(
      y,
      [&] {
        must(feed_forward(x.data(), rows, width, norm, gated ? &both[0] : nullptr, both[1], reduction, units,
                          activation, add, y.data()));
      },
      [&] {
        const size_t outputs[2] = {units, units};
        float* const results[2] = {hidden.data(), other.data()};
        must(to_units(x.data(), rows, norm, gated ? both : both + 1, outputs, results, gated ? 2 : 1));
        for (size_t row = 0; row < rows; row++) {
          float* to = hidden.data() + row * units;
          backend().activate(to, gated ? other.data() + row * units : nullptr, units, activation);
        }
        must(from_units(hidden.data(), rows, reduction, 1, units, width, add ? x.data() : nullptr,
                        expected.data()));
        for (size_t i = 0; i < rows * width; i++) {
          if (memcmp(&y.data()[i], &expected.data()[i], 4)) {
            fail("a block is not its parts", i / width, i % width, y.data()[i], expected.data()[i], 0);
          }
        }
      });
}

void check_integers(Random& random) {
  const size_t rows = random.rows(), inputs = random.in(1, 600), outputs = random.in(1, 150);
  shape = "integers rows " + std::to_string(rows) + " inputs " + std::to_string(inputs);
  const Weight w = Weight::of_outputs(random, outputs, inputs, 8, 0);
  Buffer<int8_t> x(rows * inputs);
  for (size_t i = 0; i < x.size(); i++) x.data()[i] = static_cast<int8_t>(random.below(255)) - 127;
  const Units units{w.data.data(), nullptr, 8, 0, w.panels, inputs};
  Buffer<float> y(rows * outputs);  // of the same size as int32
  static_assert(sizeof(float) == sizeof(int32_t));
  int32_t* sums = reinterpret_cast<int32_t*>(y.data());
  everywhere(
      y, [&] { must(integer_product(x.data(), rows, units, outputs, sums)); },
      [&] {
        for (size_t i = 0; i < rows * outputs; i++) {
          int32_t expected = 0, got;
          for (size_t k = 0; k < inputs; k++) {
            expected += x.data()[i / outputs * inputs + k] * w.levels[k * outputs + i % outputs];
          }
          memcpy(&got, sums + i, 4);
          if (got != expected) fail("a sum is wrong", i / outputs, i % outputs, got, expected, 0);
        }
      });
}
