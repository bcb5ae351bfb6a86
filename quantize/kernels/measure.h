// Faults and counts of a stored matrix, and the difference of two. Included by cpu.cpp once for each instruction set.

LANE_INLINE u32 any_code(const uint8_t* codes, int64_t n, uint64_t mask, uint64_t zero) {
  uint64_t all = 0;
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) all |= (load<uint64_t>(codes + j) ^ zero) & mask;
  for (; j < n; j++) all |= (codes[j] ^ zero) & mask & 0xff;
  return all != 0;
}

// Largest magnitude among n codes, as bits: of the float for plain kinds, of the code for e4m3; else 0 where all are 0.
LANE_INLINE u32 largest_stored(int kind, const uint8_t* codes, int64_t i, int64_t n) {
  switch (kind) {
    case kF32: return largest_code<Words, u32>(codes + 4 * i, n, 0x7fffffffu, 0);
    case kBF16: return largest_code<WideHalves, uint16_t>(codes + 2 * i, n, 0x7fff, 0);
    case kF16: return largest_code<WideHalves, uint16_t>(codes + 2 * i, n, 0x7fff, 0);
    case kE4M3: return largest_code<WideBytes, uint8_t>(codes + i, n, 0x7f, 0);
    case kInt4: return any_code(codes + i / 2, n / 2, 0xffffffffffffffffULL, 0x8888888888888888ULL);
    default: return any_code(codes + i / 2, n / 2, 0x7777777777777777ULL, 0);
  }
}

constexpr int kSpan = 64;  // blocks of one block row that are worked on together

// False where a weight is not finite. Scales have been looked at before; a block's codes can still overflow with it.
static bool check(const Matrix& m, Report& report) {
  if (m.kind < kE4M3) {
    const u32 infinity = m.kind == kF32 ? kInfinity : m.kind == kBF16 ? 0x7f80u : 0x7c00u;
    for (int64_t row = 0; row < m.rows; row++)
      if (largest_stored(m.kind, m.codes, row * m.cols, m.cols) >= infinity) return false;
    return true;
  }
  const int64_t columns = scale_columns(m);
  for (int64_t above = 0; above < m.rows; above += m.block_rows) {
    const int64_t below = m.rows - above < m.block_rows ? m.rows : above + m.block_rows;
    for (int64_t first = 0; first < columns; first += kSpan) {
      const int64_t count = columns - first < kSpan ? columns - first : kSpan;
      u32 tops[kSpan] = {};
      for (int64_t row = above; row < below; row++)
        for (int64_t block = 0; block < count; block++) {
          const int64_t left = (first + block) * m.block_cols;
          const int64_t n = m.cols - left < m.block_cols ? m.cols - left : m.block_cols;
          tops[block] = larger(tops[block], largest_stored(m.kind, m.codes, row * m.cols + left, n));
        }
      for (int64_t block = 0; block < count; block++) {
        const float scale = scale_value(m.scale_kind, m.scales, above / m.block_rows * columns + first + block);
        report.zero_blocks += tops[block] == 0;
        if (m.kind == kE4M3 && tops[block] == 127) return false;
        const float bound = m.kind == kE4M3 ? e4m3_value(tops[block]) : 8.0f;
        if (tops[block] && (bits(bound * scale) & 0x7fffffffu) >= kInfinity) {
          if (m.kind == kE4M3) return false;
          alignas(64) float x[kTile];  // an INT4 or e2m1 block under an enormous scale: look at its values
          const int64_t left = (first + block) * m.block_cols;
          const int64_t right = m.cols - left < m.block_cols ? m.cols : left + m.block_cols;
          for (int64_t row = above; row < below; row++)
            for (int64_t column = left, n; column < right; column += n) {
              n = right - column < kTile ? right - column : kTile;
              decode(m, row, column, n, x);
              if (largest_stored(kF32, (const uint8_t*)x, 0, n) >= kInfinity) return false;
            }
        }
      }
    }
  }
  return true;
}

// Sums of (a - b)^2 and a^2 and the largest |a - b|, of decoded values. False where one of them is not finite.
static bool compare(const Matrix& a, const Matrix& b, Report& report) {
  alignas(64) float x[kTile], y[kTile];
  Sums sums;
  u32 most = 0;
  for (int64_t row = 0; row < a.rows; row++)
    for (int64_t column = 0, n; column < a.cols; column += n) {
      n = a.cols - column < kTile ? a.cols - column : kTile;
      decode(a, row, column, n, x);
      decode(b, row, column, n, y);
      if (!no_nans(a, row, column, n) || !no_nans(b, row, column, n)) return false;
      prefetch(a, row * a.cols + column + n, n);
      prefetch(b, row * a.cols + column + n, n);
      Words top = {}, gap = {};
      Sums own;
      int64_t j = 0;
      for (; j + LANES <= n; j += LANES) {
        if (j % kFlush == 0) own.flush();
        const Floats v = load<Floats>(x + j), w = load<Floats>(y + j), e = v - w;
        top = larger(top, larger(bits(v) & 0x7fffffffu, bits(w) & 0x7fffffffu));
        gap = larger(gap, bits(e) & 0x7fffffffu);
        own.add(e, v);
      }
      own.flush();
      u32 amax = largest(top), difference = largest(gap);
      const bool exact_sums = !ordinary(amax) || !ordinary(difference);
      if (exact_sums) own = Sums(), j = 0;
      for (; j < n; j++) {
        amax = larger(amax, larger(bits(x[j]) & 0x7fffffffu, bits(y[j]) & 0x7fffffffu));
        difference = larger(difference, bits(x[j] - y[j]) & 0x7fffffffu);
        own.add_exact((double)x[j] - y[j], x[j]);
      }
      if (amax >= kInfinity) return false;
      most = larger(most, difference);
      sums.error_rest += own.error2();
      sums.norm_rest += own.norm2();
    }
  report.error2 = sums.error2();
  report.norm2 = sums.norm2();
  report.max_error = as_float(most);
  return true;
}
