// float32 tiles -> e4m3 and BF16. Included by cpu.cpp once for each instruction set.

// A strip: some 128x128 blocks side by side, or one wider block. Its rows are read twice: for amax, then for the codes.
constexpr int kStrip = 512;  // columns of 128x128 blocks worked on together: 128 rows of them fit the L2 cache
constexpr int kSmallestBlock = 8;

template <class V>
struct Tops {
  V wide[kStrip / kSmallestBlock];
  u32 rest[kStrip / kSmallestBlock];
};

// One row of a strip, n plain values or decoded floats: updates the largest of each block.
template <class V, class E>
LANE_INLINE void update_tops(const void* row, int64_t n, int64_t block_cols, E mask, Tops<V>& tops) {
  constexpr int lanes = sizeof(V) / sizeof(E);
  const E* values = (const E*)row;
  for (int64_t block = 0, j = 0; j < n; block++) {
    const int64_t end = n - j < block_cols ? n : j + block_cols;
    V top = tops.wide[block];
    for (; j + lanes <= end; j += lanes) {
      const V value = load<V>(values + j) & mask;
      top = value > top ? value : top;
    }
    tops.wide[block] = top;
    for (; j < end; j++) tops.rest[block] = larger(tops.rest[block], (u32)(load<E>(values + j) & mask));
  }
}

template <class V, class E>
LANE_INLINE void store_tops(const Tops<V>& tops, int64_t blocks, int kind, float* amax) {
  for (int64_t block = 0; block < blocks; block++) {
    u32 best = tops.rest[block];
    for (E value : (const E(&)[sizeof(V) / sizeof(E)])tops.wide[block]) best = larger(best, (u32)value);
    amax[block] = kind == kBF16 ? as_float(best << 16) : kind == kF16 ? f16_value(best) : as_float(best);
  }
}

struct Strip {
  int64_t above, below, left, right, block_cols, blocks;
};

// amax of the blocks of a strip. Plain values are compared as they are stored.
LANE_INLINE bool strip_amax(const Matrix& m, const Strip& s, float* amax) {
  const int64_t n = s.right - s.left;
  if (m.kind == kBF16 || m.kind == kF16) {
    Tops<WideHalves> tops = {};
    for (int64_t row = s.above; row < s.below; row++)
      update_tops<WideHalves, uint16_t>(m.codes + 2 * (row * m.cols + s.left), n, s.block_cols, 0x7fff, tops);
    store_tops<WideHalves, uint16_t>(tops, s.blocks, m.kind, amax);
    return true;
  }
  alignas(64) float x[kTile];
  Tops<Words> tops = {};
  for (int64_t row = s.above; row < s.below; row++)
    for (int64_t column = s.left, width; column < s.right; column += width) {
      width = s.right - column < kTile ? s.right - column : kTile;
      if (s.block_cols % kChunk == 0 && width % kChunk == 0) decode_in_turn(m, row, column, width, x);
      else decode(m, row, column, width, x);
      if (!no_nans(m, row, column, width)) return false;
      update_tops<Words, u32>(x, width, s.block_cols, 0x7fffffffu, tops);  // a strip wider than a tile is one block
    }
  store_tops<Words, u32>(tops, s.blocks, kF32, amax);
  return true;
}

// Sums of one block's squares, flushed every few rows. Under a power of two, errors are summed in units of the scale:
// exact, and always within float's range. `unit`: what error2 is counted in; 0 where it is not to be trusted.
struct BlockSums {
  Floats error2 = {}, norm2 = {};
  double unit;
  bool exact_sums;
  LANE_MEMBER void flush(Sums& sums) {
    sums.take(error2, norm2, unit, exact_sums);
    error2 = norm2 = Floats{};
  }
};

// n elements of one block, which lie in one row.
template <bool power_of_two>
LANE_INLINE void e4m3_run(const float* x, int64_t n, float scale, uint8_t* codes, BlockSums& block, Sums& sums) {
  const Floats s = splat<Floats>(scale), r = splat<Floats>(1.0f / scale);
  BlockSums own = block;
  Floats magnitude;
  int64_t j = 0;
  for (; j + LANES <= n; j += LANES) {
    const Floats v = load<Floats>(x + j), scaled = power_of_two ? v * r : v / s;
    store_bytes(codes + j, e4m3_code<false>(scaled, &magnitude));
    const Floats error = power_of_two ? absolute(scaled) - magnitude : absolute(v) - magnitude * s;
    own.error2 = fused(error, error, own.error2);
    own.norm2 = fused(v, v, own.norm2);
    if (j % kFlush == kFlush - LANES) own.flush(sums);
  }
  block = own;
  const int64_t wide = j;
  for (float rest; j < n; j++) codes[j] = (uint8_t)e4m3_code<false>(x[j] / scale, &rest);
  for (j = block.exact_sums ? 0 : wide; j < n; j++) {
    const double error = (double)x[j] - code_value(kE4M3, codes, j) * scale;
    sums.add_exact(power_of_two && j < wide ? 0.0 : error, x[j]);
  }
}

LANE_INLINE void e4m3_strip(const Matrix& m, const Target& t, const Strip& s, const float* scales, bool exact_sums,
                            Sums& sums) {
  alignas(64) float x[kTile];
  BlockSums block_sums[kStrip / kSmallestBlock];
  for (int64_t block = 0; block < s.blocks; block++) {
    block_sums[block].exact_sums = exact_sums;
    block_sums[block].unit = t.power_of_two ? (double)scales[block] * scales[block] : exact_sums ? 0.0 : 1.0;
  }
  int64_t pending = 0;
  for (int64_t row = s.above; row < s.below; row++) {
    for (int64_t column = s.left, width; column < s.right; column += width) {
      width = s.right - column < kTile ? s.right - column : kTile;
      decode(m, row, column, width, x);
      const int64_t i = row * m.cols + column;
      for (int64_t block = 0, j = 0; j < width; block++) {
        const int64_t run = width - j < s.block_cols ? width - j : s.block_cols;
        prefetch(m, i + j + (s.right - s.left), run);  // the same rows of the next strip
        if (t.power_of_two) e4m3_run<true>(x + j, run, scales[block], t.codes + i + j, block_sums[block], sums);
        else e4m3_run<false>(x + j, run, scales[block], t.codes + i + j, block_sums[block], sums);
        j += run;
      }
    }
    pending += s.block_cols;
    if (pending < kFlush && row + 1 < s.below) continue;
    for (int64_t block = 0; block < s.blocks; block++) block_sums[block].flush(sums);
    pending = 0;
  }
}

static bool to_e4m3(const Matrix& m, const Target& t, Report& report) {
  float amax[kStrip / kSmallestBlock], scales[kStrip / kSmallestBlock];
  Sums sums;
  const int64_t width = t.block_cols <= kStrip ? kStrip / t.block_cols * t.block_cols : t.block_cols;
  const int64_t scale_columns = (m.cols + t.block_cols - 1) / t.block_cols;
  Strip s;
  s.block_cols = t.block_cols;
  for (s.above = 0; s.above < m.rows; s.above = s.below) {
    s.below = m.rows - s.above < t.block_rows ? m.rows : s.above + t.block_rows;
    for (s.left = 0; s.left < m.cols; s.left = s.right) {
      s.right = m.cols - s.left < width ? m.cols : s.left + width;
      s.blocks = (s.right - s.left + t.block_cols - 1) / t.block_cols;
      if (!strip_amax(m, s, amax)) return false;
      bool exact_sums = false;
      uint8_t* stored = t.scales + 4 * (s.above / t.block_rows * scale_columns + s.left / t.block_cols);
      for (int64_t block = 0; block < s.blocks; block++) {
        if (bits(amax[block]) >= kInfinity) return false;
        scales[block] = e4m3_scale(amax[block], t.power_of_two);
        store(stored + 4 * block, scales[block]);
        report.zero_blocks += amax[block] == 0.0f;
        exact_sums |= !ordinary(bits(amax[block]));
      }
      e4m3_strip(m, t, s, scales, exact_sums, sums);
    }
  }
  report.error2 = sums.error2();
  report.norm2 = sums.norm2();
  return true;
}

static bool to_bf16(const Matrix& m, const Target& t, Report& report) {
  alignas(64) float x[kTile];
  Sums sums;
  for (int64_t row = 0; row < m.rows; row++)
    for (int64_t column = 0, n; column < m.cols; column += n) {
      n = m.cols - column < kTile ? m.cols - column : kTile;
      decode(m, row, column, n, x);
      if (!no_nans(m, row, column, n)) return false;
      uint8_t* codes = t.codes + 2 * (row * m.cols + column);
      const u32 amax = largest_code<Words, u32>((const uint8_t*)x, n, 0x7fffffffu, 0);
      if (amax >= 0x7f7f8000u) return false;  // would round to infinity, or is not finite
      prefetch(m, row * m.cols + column + n, n);
      int64_t j = 0;
      if (ordinary(amax))
        for (; j + LANES <= n; j += LANES) {
          if (j % kFlush == 0) sums.flush();
          const Floats v = load<Floats>(x + j);
          const Words rounded = bf16_bits(bits(v));
          store_halves(codes + 2 * j, rounded >> 16);
          sums.add(v - as_float(rounded), v);
        }
      for (; j < n; j++) {
        const u32 rounded = bf16_bits(bits(x[j]));
        store(codes + 2 * j, (uint16_t)(rounded >> 16));
        sums.add_exact(x[j] - as_float(rounded), x[j]);
      }
      sums.flush();
    }
  report.error2 = sums.error2();
  report.norm2 = sums.norm2();
  return true;
}

// False: a fault, which the caller looks for; report.fault is set where it is known.
static bool convert(const Matrix& m, const Target& t, Report& report) {
  if (t.kind == kBF16) return to_bf16(m, t, report);
  if (t.kind == kE4M3) return to_e4m3(m, t, report);
  if (t.block_cols == 32) return to_int4<32>(m, t, report);
  if (t.block_cols == 64) return to_int4<64>(m, t, report);
  return to_int4<128>(m, t, report);
}
