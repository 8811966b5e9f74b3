// Products of quantized weights beside their sums in double: part of native_check.cpp.

// What a product must be: sums and how far off they may be, [rows][outputs], with weights as they are stored
// and with wider ones. Each row is the one or the other.
class Expected {
 public:
  Expected(const Weight& w, const Change& change, bool units_are_outputs, const std::vector<float>& x,
           size_t rows, const float* residual, bool widen)
      : rows_(rows), outputs_(w.outputs) {
    const std::vector<double> seen = rounded(x, rows, w.segments, w.inputs);
    add(w.dense, w.sizes, seen, residual);
    if (widen && !w.wider.empty()) add(w.wider, w.wider, seen, residual);
    const size_t inputs = w.segments * w.inputs;
    if (!change.rank) return;
    // Adapters see activations as they are.
    for (size_t i = 0; i < inputs; i++) {
      for (size_t o = 0; o < outputs_; o++) {
        const size_t unit = units_are_outputs ? o : i, place = units_are_outputs ? i : o;
        const double more = change.at(unit, place), size = change.size_at(unit, place);
        for (size_t row = 0; row < rows; row++) {
          const double value = x[row * inputs + i];
          for (Sums& each : sums_) {
            each.value[row * outputs_ + o] += value * more;
            each.room[row * outputs_ + o] += 2e-6 * fabs(value) * size;
          }
        }
      }
    }
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

  void add(const std::vector<double>& dense, const std::vector<double>& sizes,
           const std::vector<double>& seen, const float* residual) {
    Sums sums{std::vector<double>(rows_ * outputs_), std::vector<double>(rows_ * outputs_)};
    const size_t inputs = dense.size() / outputs_;
    for (size_t row = 0; row < rows_; row++) {
      double *value = &sums.value[row * outputs_], *room = &sums.room[row * outputs_];
      for (size_t i = 0; i < inputs; i++) {
        const double x = seen[row * inputs + i], *w = &dense[i * outputs_], *size = &sizes[i * outputs_];
        for (size_t o = 0; o < outputs_; o++) value[o] += x * w[o], room[o] += fabs(x * size[o]);
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

// Unless weights may be widened, a row alone gives the bits that it gives among others.
void judge_alone(const float* alone, const float* among, size_t row, size_t count) {
  for (size_t o = 0; o < count; o++) {
    if (memcmp(alone + o, among + o, sizeof(float)))
      fail("a row alone gives other bits", row, o, alone[o], among[o], 0);
  }
}

void check_to_units(Random& random) {
  const size_t rows = random.rows(), count = random.below(3) + 1, inputs = random.in(1, 600);
  const Format format = Format::draw(random);
  const bool widen = random.below(2);
  shape = "to_units rows " + std::to_string(rows) + " inputs " + std::to_string(inputs) + format.text() +
          (widen ? " widened" : "");
  std::vector<Weight> weights;
  std::vector<Change> changes;
  std::vector<Outputs> results;
  std::vector<size_t> starts{0};
  std::vector<Buffer<float>> memory;
  const std::vector<float> values = random.floats(rows * inputs);
  const Buffer<float> x(values);
  std::vector<Expected> expected;
  for (size_t i = 0; i < count; i++) {
    const size_t outputs = random.in(1, 150), stride = outputs + random.below(2) * random.below(40);
    shape += " outputs " + std::to_string(outputs);
    weights.push_back(Weight::of_outputs(random, outputs, inputs, format));
    changes.emplace_back(random, outputs, inputs);
    shape += " rank " + std::to_string(changes[i].rank);
    expected.emplace_back(weights[i], changes[i], true, values, rows, nullptr, widen);
    memory.emplace_back(rows * stride);
    results.push_back({{}, {}, outputs, stride, nullptr, {}});
    starts.push_back(starts[i] + rows * outputs);
  }
  for (size_t i = 0; i < count; i++) {
    const Weight& w = weights[i];
    results[i].weight = w.units(widen);
    results[i].adapter = changes[i].adapter();
    results[i].y = memory[i].data();
  }
  // One buffer for each result; what is used of them compared as one.
  Buffer<float> y(starts[count]);
  everywhere(
      y,
      [&] {
        must(to_units(x.data(), rows, {nullptr, 0}, {}, results.data(), count));
        for (size_t i = 0; i < count; i++) {
          const size_t outputs = results[i].outputs, stride = results[i].stride;
          for (size_t row = 0; row < rows; row++) {
            memcpy(y.data() + starts[i] + row * outputs, results[i].y + row * stride, outputs * 4);
            for (size_t o = outputs; o < stride; o++)
              if (!isnan(results[i].y[row * stride + o])) fail("a unit too many", row, o, 0, 0, 0);
          }
        }
      },
      [&] {
        for (size_t i = 0; i < count; i++) expected[i].judge(y.data() + starts[i]);
        if (widen) return;
        const size_t row = rows / 2;
        must(to_units(x.data() + row * inputs, 1, {nullptr, 0}, {}, results.data(), count));
        for (size_t i = 0; i < count; i++) {
          const size_t outputs = results[i].outputs;
          judge_alone(results[i].y, y.data() + starts[i] + row * outputs, row, outputs);
        }
      });
}

void check_from_units(Random& random) {
  const size_t rows = random.rows(), segments = random.below(2) ? 1 : random.in(1, 4),
               outputs = random.in(1, 150);
  const size_t length = random.in(1, segments == 1 ? 600 : 90);
  const Format format = Format::draw(random);
  shape = "from_units rows " + std::to_string(rows) + " segments " + std::to_string(segments) + " length " +
          std::to_string(length) + " outputs " + std::to_string(outputs) + format.text();
  const bool widen = random.below(2);
  const Weight w = Weight::of_inputs(random, segments, length, outputs, format);
  const size_t inputs = segments * length, stride = inputs + random.below(2) * random.below(40);
  const std::vector<float> values = random.floats(rows * inputs), more = random.floats(rows * outputs);
  const Change change(random, inputs, outputs);
  shape += " rank " + std::to_string(change.rank);
  Buffer<float> h((rows - 1) * stride + inputs);  // NaN between rows
  for (size_t row = 0; row < rows; row++)
    memcpy(h.data() + row * stride, values.data() + row * inputs, inputs * sizeof(float));
  const Buffer<float> residual(more);
  const float* add = random.below(2) ? residual.data() : nullptr;
  const Reduction reduction = w.reduction(widen);
  const Expected expected(w, change, false, values, rows, add, widen);
  Buffer<float> y(rows * outputs), alone(outputs);
  everywhere(
      y,
      [&] {
        must(from_units(h.data(), rows, stride, {}, reduction, change.adapter(), {}, segments, length,
                        outputs, add, y.data()));
      },
      [&] {
        expected.judge(y.data());
        if (widen) return;
        const size_t row = rows / 2;
        must(from_units(h.data() + row * stride, 1, stride, {}, reduction, change.adapter(), {}, segments,
                        length, outputs, add ? add + row * outputs : nullptr, alone.data()));
        judge_alone(alone.data(), y.data() + row * outputs, row, outputs);
      });
}

// A block is its parts, to the bit: products, activation, product.
void check_feed_forward(Random& random) {
  const size_t rows = random.rows(), width = random.in(1, 300), units = random.in(1, 300);
  const Format format = Format::draw(random);
  const int activation = static_cast<int>(random.below(4));
  const bool gated = random.below(2), add = random.below(2), widen = random.below(2);
  shape = "feed_forward rows " + std::to_string(rows) + " width " + std::to_string(width) + " units " +
          std::to_string(units) + format.text();
  const Weight gate = Weight::of_outputs(random, units, width, format);
  const Weight up = Weight::of_outputs(random, units, width, format);
  const Weight down = Weight::of_inputs(random, 1, units, width, format);
  const Change changes[3] = {{random, units, width}, {random, units, width}, {random, units, width}};
  Block block{gate.units(widen),
              up.units(widen),
              down.reduction(widen),
              changes[0].adapter(),
              changes[1].adapter(),
              changes[2].adapter(),
              {},
              {},
              {}};
  if (!gated) block.gate.stored.data = nullptr;
  const Buffer<float> x(random.floats(rows * width)), scale(random.floats(width));
  const Norm norm{random.below(2) ? scale.data() : nullptr, 1e-5f};
  const Shadow outer(random, width, units), inner(random, units, width);
  Steps steps{};
  if (format.bits == 8 && !format.group && random.below(2)) {
    steps = {outer.step(0.02f), inner.step(0.05f)};
    block.gate_floats = block.up_floats = outer.floats();
    block.down_floats = inner.floats();
    shape += " shadow";
  }
  Buffer<float> y(rows * width), expected(rows * width), hidden(rows * units), other(rows * units);
  everywhere(
      y,
      [&] {
        must(feed_forward(x.data(), rows, width, norm, steps, block, units, activation, add, y.data()));
      },
      [&] {
        const int32_t counts[2] = {*outer.count.data(), *inner.count.data()};
        Outputs results[2] = {{block.up, block.up_adapter, units, units, hidden.data(), block.up_floats}};
        if (gated) {
          results[1] = {block.up, block.up_adapter, units, units, other.data(), block.up_floats};
          results[0] = {block.gate, block.gate_adapter, units, units, hidden.data(), block.gate_floats};
        }
        must(to_units(x.data(), rows, norm, steps.in, results, gated ? 2 : 1));
        for (size_t row = 0; row < rows; row++) {
          float* to = hidden.data() + row * units;
          backend().activate(to, gated ? other.data() + row * units : nullptr, units, activation);
        }
        must(from_units(hidden.data(), rows, units, steps.hidden, block.down, block.down_adapter,
                        block.down_floats, 1, units, width, add ? x.data() : nullptr, expected.data()));
        if (counts[0] != *outer.count.data() || counts[1] != *inner.count.data())
          fail("other channels have outliers", 0, 0, counts[0], *outer.count.data(), 0);
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
  const Weight w = Weight::of_outputs(random, outputs, inputs);
  Buffer<int8_t> x(rows * inputs);
  for (size_t i = 0; i < x.size(); i++) x.data()[i] = static_cast<int8_t>(random.below(255)) - 127;
  const Units units = w.units(false);
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
