// One scale's worth of codes: encoding under a scale, and how INT4's scales are found.

// A vector's codes under an e4m3 scale that was made from its block's amax: no quotient is beyond 448.
template <bool power_of_two>
struct E4M3 {
  float scale, inverse;
  PHASEFOLD_INLINE explicit E4M3(float s) : scale(s), inverse(1.0f / s) {}
  PHASEFOLD_INLINE Words<2> operator()(const float (&x)[kVector], Found& found) const {
    Words<2> out = {};
    Sums sums;
#pragma unroll
    for (int i = 0; i < (int)kVector; i++) {
      float magnitude;
      const u32 code = e4m3_code<false>(power_of_two ? x[i] * inverse : divided(x[i], scale, inverse), &magnitude);
      out.word[i / 4] |= (code & 0xffu) << (i % 4 * 8);
      sums.add(absolute(x[i]) - magnitude * scale, x[i]);
    }
    found.sums.add(sums);
    return out;
  }
};

// Write the scale of a block of 128 x 128 or of a row, which are counted like the tiles; one thread does it.
PHASEFOLD_INLINE void write_e4m3_scale(const Job& job, float scale, u32 top, Found& found) {
  reinterpret_cast<float*>(job.out_scales)[blockIdx.x] = scale;
  if (top == 0) found.count(found.shared.zero_blocks);
  if (rare(top)) found.count(found.shared.rare);
}

// A vector's codes, one word of them, under an INT4 scale that a method has found. kSearch: it may be so small that codes
// are cut off at both ends; else only 8 has to become 7. kInverse: bf16(q * scale) is what was encoded, without an error.
template <int method>
struct Int4 {
  float scale, inverse;
  PHASEFOLD_INLINE explicit Int4(float s) : scale(s), inverse(1.0f / s) {}
  PHASEFOLD_INLINE u32 operator()(const float (&x)[kVector], Found& found) const {
    u32 word = 0u - 0x4b400000u * 0x11111111u;  // all that `biased` has above its nibbles, taken off at once
    Sums sums;
#pragma unroll
    for (int i = 0; i < (int)kVector; i++) {
      float biased = quotient<true>(x[i], scale, inverse) + int4_magic;
      if (method == kSearch) biased = int4_clamped(biased);
      else biased = as_float(smaller(bits(biased), 0x4b40000fu));
      word += bits(biased) << (i * 4);
      sums.add(method == kInverse ? 0.0f : minus_exact_product(x[i], biased - int4_magic, scale), x[i]);
    }
    found.sums.add(sums);
    return word;
  }
};

// Write a group's scale, which begins with this element; 0 stands for none.
template <int group>
PHASEFOLD_INLINE void write_int4_scale(const Job& job, u32 element, float scale, u32 top, Found& found) {
  reinterpret_cast<u16*>(job.out_scales)[element / group] = (u16)(bits(scale) >> 16);
  if (top - kOrdinaryLow < kOrdinaryHigh - kOrdinaryLow && scale != 0.0f) return;
  if (top == 0) found.count(found.shared.zero_blocks);
  if (rare(top)) found.count(found.shared.rare);
  if (bits(scale) - 1 < 0x00800000u - 1) /* subnormal, not 0 */ found.count(found.shared.tiny_scales);
  if (scale == 0.0f) found.note(kNoInverse, element);
}

// The scale with which x = bf16(q * scale) holds for a whole group, of which each of group / 8 neighbours has a vector;
// 0 where none of those tried does. All threads of a warp stay until all have theirs.
template <int group>
PHASEFOLD_INLINE float inverse_scale(const float (&x)[kVector], float amax) {
  float found = amax == 0.0f ? 1.0f : 0.0f;
#pragma unroll 1
  for (int turn = 0; turn < 3 * num_inverse_levels; turn++) {
    const float level = inverse_level(turn / 3);
    const u32 middle = bf16_bits(bits(amax / level));
    const u32 candidate = middle + (turn % 3 == 0 ? 0u : turn % 3 == 1 ? ~0xffffu : 0x10000u);
    u32 mismatch = 0;
#pragma unroll
    for (int i = 0; i < (int)kVector; i++) mismatch |= inverse_mismatch(x[i], as_float(candidate));
    mismatch = max_of_neighbours<group / (int)kVector>(mismatch);
    if (found == 0.0f && mismatch == 0) found = as_float(candidate);
    if (!__any_sync(kAll, found == 0.0f)) break;
  }
  return found;
}

// The best of nine scales for x[0 .. group - 1], by the sum of weighted squared errors, added in the elements' order.
template <int group>
PHASEFOLD_INLINE float best_scale(const float* x, float amax, int objective, const float* column_weights) {
  float scales[num_divisors], inverses[num_divisors], errors[num_divisors], sum = 0.0f;
#pragma unroll
  for (int c = 0; c < num_divisors; c++) {
    scales[c] = int4_scale(amax, divisor(c));
    inverses[c] = 1.0f / scales[c];
    errors[c] = 0.0f;
  }
#pragma unroll 8
  for (int i = 0; i < group; i++) sum = sum + x[i] * x[i];
  const float sigma2 = sum * (1.0f / group);
#pragma unroll 2
  for (int i = 0; i < group; i++) {
    float weight = element_weight(x[i], sigma2, objective);
    if (column_weights) weight = weight * column_weights[i];
#pragma unroll
    for (int c = 0; c < num_divisors; c++)
      errors[c] = errors[c] + search_term(x[i], weight, scales[c], inverses[c], divisor(c));
  }
  float best = scales[0], least = errors[0];
#pragma unroll
  for (int c = 1; c < num_divisors; c++) {
    best = errors[c] < least ? scales[c] : best;
    least = errors[c] < least ? errors[c] : least;
  }
  return bits(amax) >= search_low && bits(amax) <= search_high ? best : scales[0];
}
