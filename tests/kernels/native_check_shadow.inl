// Products in steps with what these clip, beside their sums in double: part of native_check.cpp.

// Judges y [rows][outputs]: the clipped part of x [rows][inputs] in whole steps times the weight, its excess
// times the rows of its inputs.
void judge_shadow(const Weight& w, const Shadow& shadow, const Step& step, const float* x, size_t rows,
                  const float* residual, const float* y) {
  const size_t inputs = w.segments * w.inputs, outputs = w.outputs;
  const float top = 127.0f * step.size, factor = 1.0f / step.size;
  std::vector<bool> beyond(inputs);
  for (size_t row = 0; row < rows; row++) {
    std::vector<double> value(outputs), room(outputs);
    for (size_t i = 0; i < inputs; i++) {
      const float in = x[row * inputs + i], more = in - std::clamp(in, -top, top);
      const double level = rintf(std::clamp(in * factor, -127.0f, 127.0f));
      beyond[i] = beyond[i] || more != 0;
      for (size_t o = 0; o < outputs; o++) {
        const double own = w.dense[i * outputs + o];
        const double clipped = level * step.size * own, added = more * shadow.at(i, o, own);
        value[o] += clipped + added;
        room[o] += fabs(clipped) + fabs(added);
      }
    }
    for (size_t o = 0; o < outputs; o++) {
      const double add = residual ? residual[row * outputs + o] : 0;
      const double off = fabs(y[row * outputs + o] - value[o] - add),
                   most = 2e-6 * (room[o] + fabs(add)) + 1e-30;
      if (!(off <= most)) fail("a shadow is wrong", row, o, y[row * outputs + o], value[o] + add, most);
    }
  }
  const auto count = std::count(beyond.begin(), beyond.end(), true);
  if (*step.channels != count) fail("other channels have outliers", 0, 0, *step.channels, count, 0);
}

// A step that all of x keeps within, or that some or most of it passes.
float draw_step(Random& random, const std::vector<float>& x) {
  float top = 0;
  for (const float each : x) top = std::max(top, fabsf(each));
  const float shares[4] = {1.01f, 0.6f, 0.1f, 0.001f};
  return shares[random.below(4)] * top / 127.0f;
}

void check_shadow(Random& random) {
  const size_t rows = random.rows(), inputs = random.in(1, 600), outputs = random.in(1, 150);
  shape = "shadow of rows " + std::to_string(rows) + " inputs " + std::to_string(inputs) + " outputs " +
          std::to_string(outputs);
  const Weight w = Weight::of_outputs(random, outputs, inputs);
  const Shadow shadow(random, inputs, outputs);
  const std::vector<float> values = random.floats(rows * inputs);
  const Buffer<float> x(values), scale(random.floats(inputs));
  const bool normed = random.below(2);
  const Norm norm{normed ? scale.data() : nullptr, 1e-5f};
  const Step step = shadow.step(draw_step(random, values));
  Buffer<float> y(rows * outputs);
  const Outputs result{w.units(false), {}, outputs, outputs, y.data(), shadow.floats()};
  everywhere(
      y, [&] { must(to_units(x.data(), rows, norm, step, &result, 1)); },
      [&] {
        std::vector<float> seen = values;
        for (size_t row = 0; normed && row < rows; row++) {
          backend().rms_norm(x.data() + row * inputs, scale.data(), norm.eps, inputs, &seen[row * inputs]);
        }
        judge_shadow(w, shadow, step, seen.data(), rows, nullptr, y.data());
      });
}

void check_shadow_of_inputs(Random& random) {
  const size_t rows = random.rows(), segments = random.below(2) ? 1 : random.in(1, 4);
  const size_t length = random.in(1, segments == 1 ? 600 : 90), outputs = random.in(1, 150);
  shape = "shadow of rows " + std::to_string(rows) + " segments " + std::to_string(segments) + " length " +
          std::to_string(length) + " outputs " + std::to_string(outputs);
  const Weight w = Weight::of_inputs(random, segments, length, outputs);
  const size_t inputs = segments * length, stride = inputs + random.below(2) * random.below(40);
  const Shadow shadow(random, inputs, outputs);
  const std::vector<float> values = random.floats(rows * inputs);
  Buffer<float> h((rows - 1) * stride + inputs);  // NaN between rows
  for (size_t row = 0; row < rows; row++)
    memcpy(h.data() + row * stride, values.data() + row * inputs, inputs * sizeof(float));
  const Buffer<float> residual(random.floats(rows * outputs));
  const float* add = random.below(2) ? residual.data() : nullptr;
  const Reduction reduction = w.reduction(false);
  const Step step = shadow.step(draw_step(random, values));
  Buffer<float> y(rows * outputs);
  everywhere(
      y,
      [&] {
        must(from_units(h.data(), rows, stride, step, reduction, {}, shadow.floats(), segments, length,
                        outputs, add, y.data()));
      },
      [&] { judge_shadow(w, shadow, step, values.data(), rows, add, y.data()); });
}
