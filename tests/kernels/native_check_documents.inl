// Attention inside documents and its gradients beside plain ones in double: part of native_check.cpp.

void check_documents(Random& random) {
  DocumentShape s{};
  s.batch = random.in(1, 2), s.kv_heads = random.in(1, 3);
  s.group = random.below(8) ? random.in(1, 5) : random.in(40, 60);
  s.tokens = random.below(3) ? random.in(1, 40) : random.in(60, 200);
  s.width = random.below(2) ? 16 * random.in(1, 4) : random.in(1, 40);
  s.scale = 1.0f / sqrtf(static_cast<float>(s.width));
  const size_t longest = random.below(3) ? random.in(1, 70) : 200;
  shape = "documents B " + std::to_string(s.batch) + " T " + std::to_string(s.tokens) + " K " +
          std::to_string(s.kv_heads) + " G " + std::to_string(s.group) + " H " + std::to_string(s.width) +
          " of up to " + std::to_string(longest);
  Buffer<int32_t> starts(s.batch * s.tokens);
  for (size_t i = 0; i < starts.size(); i++) {
    const size_t t = i % s.tokens;
    const bool begins = t == 0 || random.below(longest) == 0;
    starts.data()[i] = begins ? static_cast<int32_t>(t) : starts.data()[i - 1];
  }
  if (!are_starts(starts.data(), s.batch, s.tokens)) fail("these are starts", 0, 0, 0, 0, 0);
  const size_t keys = s.batch * s.tokens * s.kv_heads, queries = keys * s.group, width = s.width;
  const Buffer<float> q(random.floats(queries * width, false)), k(random.floats(keys * width, false));
  const Buffer<float> v(random.floats(keys * width, false)), dout(random.floats(queries * width, false));
  Buffer<float> out(queries * width), lse(queries), dk(keys * width), dv(keys * width);
  // All results one after another, as `everywhere` compares them; the buffers above guard their own ends.
  Buffer<float> dq(queries * width), all(2 * queries * width + 2 * keys * width);

  std::vector<double> expected(all.size()), weights(s.tokens), reaching(s.tokens);
  double *out_sums = expected.data(), *dq_sums = out_sums + queries * width,
         *dk_sums = dq_sums + queries * width, *dv_sums = dk_sums + keys * width;
  for (size_t r = 0; r < queries; r++) {
    const size_t head = r / s.group % s.kv_heads, token = r / s.group / s.kv_heads;
    const size_t t = token % s.tokens, start = static_cast<size_t>(starts.data()[token]);
    const auto key = [&](size_t p) { return ((token - t + p) * s.kv_heads + head) * width; };
    double total = 0, mean = 0;
    for (size_t p = start; p <= t; p++) {
      double score = 0;
      reaching[p] = 0;
      for (size_t h = 0; h < width; h++) {
        score += static_cast<double>(q.data()[r * width + h]) * k.data()[key(p) + h];
        reaching[p] += static_cast<double>(dout.data()[r * width + h]) * v.data()[key(p) + h];
      }
      total += weights[p] = exp(score * s.scale);
    }
    for (size_t p = start; p <= t; p++) mean += reaching[p] * (weights[p] /= total);
    for (size_t p = start; p <= t; p++) {
      const double gradient = weights[p] * (reaching[p] - mean) * s.scale;
      for (size_t h = 0; h < width; h++) {
        out_sums[r * width + h] += weights[p] * v.data()[key(p) + h];
        dq_sums[r * width + h] += gradient * k.data()[key(p) + h];
        dk_sums[key(p) + h] += gradient * q.data()[r * width + h];
        dv_sums[key(p) + h] += weights[p] * dout.data()[r * width + h];
      }
    }
  }
  everywhere(
      all,
      [&] {
        must(document_attention(q.data(), k.data(), v.data(), starts.data(), s, out.data(), lse.data()));
        must(document_attention_gradients(q.data(), k.data(), v.data(), starts.data(), out.data(), lse.data(),
                                          dout.data(), s, dq.data(), dk.data(), dv.data()));
        float* to = all.data();
        for (const Buffer<float>* each : {&out, &dq, &dk, &dv}) {
          memcpy(to, each->data(), each->size() * sizeof(float));
          to += each->size();
        }
      },
      [&] {
        for (size_t i = 0; i < all.size(); i++) {
          const double room = 1e-4 * (1 + fabs(expected[i]));
          if (!(fabs(all.data()[i] - expected[i]) <= room))
            fail("attention in documents is wrong", i / width, i % width, all.data()[i], expected[i], room);
        }
      });
}
