// float32 tiles -> INT4 codes and BF16 scales, by three methods. Included by cpu.cpp once for each instruction set.
// Tiles lie as decode_in_turn leaves them: in each chunk the even elements, then the odd ones.

constexpr bool kFused = LANES > 4;       // does this instruction set have an FMA?
constexpr int kPrepared = 3;             // an objective: the weights lie ready

template <int kGroup, bool fast>
LANE_INLINE void int4_group(const float* x, float scale, float inverse, uint8_t* codes, Sums& sums) {
  const Floats s = splat<Floats>(scale), r = splat<Floats>(inverse);
  for (int i = 0; i < kGroup; i += kChunk) {
    const Floats even = load<Floats>(x + i), odd = load<Floats>(x + i + LANES);
    const Floats low = int4_biased(quotient<fast>(even, s, r)), high = int4_biased(quotient<fast>(odd, s, r));
    store_bytes(codes + i / 2, (bits(low) & 0x0fu) | ((bits(high) << 4) & ~0x0fu));  // the low bytes
    sums.add(minus_exact_product(even, low - int4_magic, s), even);
    sums.add(minus_exact_product(odd, high - int4_magic, s), odd);
  }
}

LANE_INLINE int element_of(int place) { return place / kChunk * kChunk + place % LANES * 2 + place / LANES % 2; }

// The candidates of LANES groups: a lane is a group, so no sum crosses lanes, and elements are added in order.
template <int kGroup, int objective>
LANE_INLINE Floats best_scale(const float* columns, const float* weights, Floats sigma2, Floats amax) {
  Floats scales[num_divisors], inverses[num_divisors], errors[num_divisors];
#pragma GCC unroll 16
  for (int c = 0; c < num_divisors; c++) {
    scales[c] = int4_scale(amax, divisor(c));
    inverses[c] = 1.0f / scales[c];
    errors[c] = Floats{};
  }
  for (int i = 0; i < kGroup; i++) {
    const Floats v = load<Floats>(columns + i * LANES);
    const Floats w =
        objective == kPrepared ? load<Floats>(weights + i * LANES) : element_weight(v, sigma2, objective);
#pragma GCC unroll 16
    for (int c = 0; c < num_divisors; c++)
      errors[c] = errors[c] + search_term(v, w, scales[c], inverses[c], divisor(c));
  }
  Floats best = scales[0], least = errors[0];
#pragma GCC unroll 16
  for (int c = 1; c < num_divisors; c++) {
    best = select(errors[c] < least, scales[c], best);
    least = select(errors[c] < least, errors[c], least);
  }
  return select((bits(amax) >= search_low) & (bits(amax) <= search_high), best, scales[0]);
}

template <int kGroup>
LANE_INLINE Floats search(const float* x, int groups, Floats amax, int objective, const float* column_weights) {
  alignas(64) float columns[kGroup * LANES];
  Floats sum = {};
  for (int i = 0; i < kGroup; i += LANES) {
    Floats rows[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) rows[j] = load<Floats>(x + j * kGroup + i);
    transpose(rows);
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) store(columns + element_of(i + j) * LANES, rows[j]);
  }
  for (int i = 0; i < kGroup; i++) {
    const Floats v = load<Floats>(columns + i * LANES);
    sum = sum + v * v;
  }
  const Floats sigma2 = sum * (1.0f / kGroup);
  if (column_weights) {
    alignas(64) float weights[kGroup * LANES];
    for (int i = 0; i < kGroup; i++) {
      store(weights + i * LANES, element_weight(load<Floats>(columns + i * LANES), sigma2, objective));
      for (int j = 0; j < groups; j++) weights[i * LANES + j] *= column_weights[j * kGroup + i];
    }
    return best_scale<kGroup, kPrepared>(columns, weights, sigma2, amax);
  }
  switch (objective) {
    case 0: return best_scale<kGroup, 0>(columns, nullptr, sigma2, amax);
    case 1: return best_scale<kGroup, 1>(columns, nullptr, sigma2, amax);
    default: return best_scale<kGroup, 2>(columns, nullptr, sigma2, amax);
  }
}

// The scale with which x = bf16(q * scale) holds for the whole group, or 0 where none of those tried does.
template <int kGroup>
LANE_INLINE float inverse_scale(const float* x, float amax) {
  if (amax == 0.0f) return 1.0f;
  for (int level = 0; level < num_inverse_levels; level++) {
    const u32 middle = bf16_bits(bits(amax / inverse_level(level)));
    for (u32 candidate : {middle, middle - 0x10000u, middle + 0x10000u}) {
      const Floats scale = splat<Floats>(as_float(candidate));
      Words mismatch = {};
      for (int i = 0; i < kGroup; i += LANES) mismatch |= inverse_mismatch(load<Floats>(x + i), scale);
      if (!any(mismatch)) return as_float(candidate);
    }
  }
  return 0.0f;
}

// Up to LANES groups of one row; x is zero beyond them; `ahead` is the element of `m` that comes after them. False: a
// weight is not finite, or (with report.fault set and report.column counted from x) a group has no exact inverse.
template <int kGroup>
LANE_INLINE bool int4_tile(const Matrix& m, int64_t ahead, const Target& t, const float* x, const float* column_weights,
                           int groups, uint8_t* codes, uint8_t* scales, Sums& sums, Report& report) {
  Words tops[LANES];
#pragma GCC unroll 16
  for (int j = 0; j < LANES; j++) {
    tops[j] = Words{};
    for (int i = 0; i < kGroup; i += LANES)
      tops[j] = larger(tops[j], bits(load<Floats>(x + j * kGroup + i)) & 0x7fffffffu);
  }
  const Words top = largest_of_each(tops);
  const Floats amax = as_float(top);
  bool exact_sums = false;
  if (any((Words)((top < kOrdinaryLow) | (top >= kOrdinaryHigh))))  // also where there are zeros
    for (int j = 0; j < groups; j++) {
      if (top[j] >= kInfinity) return false;
      report.zero_blocks += top[j] == 0;
      exact_sums |= !ordinary(top[j]);
    }
  Floats scale = int4_scale(amax, divisor(0));
  if (t.method == kSearch) scale = search<kGroup>(x, groups, amax, t.objective, column_weights);
  float scale_of[LANES], inverse_of[LANES];
  store(scale_of, scale);
  store(inverse_of, 1.0f / scale);
  if (t.method == kInverse)
    for (int j = 0; j < groups; j++) {
      scale_of[j] = inverse_scale<kGroup>(x + j * kGroup, as_float(top[j]));
      inverse_of[j] = 1.0f / scale_of[j];
      for (int i = 0; i < kGroup; i++) report.negative_zeros += bits(x[j * kGroup + i]) == 0x80000000u;
      if (scale_of[j] == 0.0f) {
        report.fault = kNoInverse;
        report.column = (int64_t)j * kGroup;
        return false;
      }
    }
  if (!exact_sums) {
    for (int j = 0; j < groups; j++) {
      prefetch(m, ahead + j * kGroup, kGroup);
      int4_group<kGroup, kFused>(x + j * kGroup, scale_of[j], inverse_of[j], codes + j * kGroup / 2, sums);
      if ((j + 1) * kGroup % kFlush == 0) sums.flush();
    }
  } else {
    for (int j = 0; j < groups; j++) {
      Sums unused;
      int4_group<kGroup, false>(x + j * kGroup, scale_of[j], 0.0f, codes + j * kGroup / 2, unused);
      for (int i = j * kGroup; i < (j + 1) * kGroup; i++)
        sums.add_exact((double)x[i] - code_value(kInt4, codes, element_of(i)) * scale_of[j], x[i]);
      report.tiny_scales += bits(scale_of[j]) < 0x00800000u;
    }
  }
  alignas(64) uint16_t halves[LANES];
  store_halves(halves, bits(load<Floats>(scale_of)) >> 16);
  memcpy(scales, halves, 2 * groups);
  return true;
}

template <int kGroup>
static bool to_int4(const Matrix& m, const Target& t, Report& report) {
  alignas(64) float x[kGroup * LANES];
  Sums sums;
  const int64_t tile = kGroup * LANES;
  bool good = true;
  for (int64_t row = 0; row < m.rows && good; row++) {
    for (int64_t column = 0; column < m.cols && good; column += tile) {
      const int64_t n = m.cols - column < tile ? m.cols - column : tile, i = row * m.cols + column;
      if (n < tile) memset(x + n, 0, (tile - n) * sizeof *x);
      decode_in_turn(m, row, column, n, x);
      good = no_nans(m, row, column, n) &&
             int4_tile<kGroup>(m, i + n, t, x, t.column_weights ? t.column_weights + column : nullptr,
                               (int)(n / kGroup), t.codes + i / 2, t.scales + 2 * (i / kGroup), sums, report);
      if (!good) report.row = row, report.column += column;
      sums.flush();
    }
  }
  report.error2 = t.method == kInverse ? 0.0 : sums.error2();  // to its reference, bf16(q * scale), that one is equal
  report.norm2 = sums.norm2();
  return good;
}
