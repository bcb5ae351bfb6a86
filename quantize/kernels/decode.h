// Stored codes and scales -> float32, in tiles of one row. Included by cpu.cpp once for each instruction set.

constexpr int kTile = 128 * LANES;  // columns worked on at once: LANES groups of 128; x, codes and scales stay in L1

LANE_INLINE float scale_value(int kind, const uint8_t* scales, int64_t i) {
  switch (kind) {
    case kF32: return load<float>(scales + 4 * i);
    case kBF16: return as_float((u32)load<uint16_t>(scales + 2 * i) << 16);
    case kF16: return f16_value((u32)load<uint16_t>(scales + 2 * i));
    default: return e8m0_value(scales[i]);
  }
}

LANE_INLINE int64_t scale_columns(const Matrix& m) { return (m.cols + m.block_cols - 1) / m.block_cols; }
LANE_INLINE int64_t scale_rows(const Matrix& m) { return (m.rows + m.block_rows - 1) / m.block_rows; }

LANE_INLINE int64_t code_offset(int kind, int64_t i) {  // of element i, in bytes
  return kind == kF32 ? 4 * i : kind <= kF16 ? 2 * i : kind == kE4M3 ? i : i / 2;
}

// Ask for n elements that will be needed soon; an address outside the matrix does no harm.
LANE_INLINE void prefetch(const Matrix& m, int64_t i, int64_t n) {
  const uint8_t* p = m.codes + code_offset(m.kind, i);
  for (const uint8_t* end = m.codes + code_offset(m.kind, i + n); p < end; p += 64) __builtin_prefetch(p);
}

// One code or plain value as float32, without its scale; `i` counts elements from the start of the matrix.
LANE_INLINE float code_value(int kind, const uint8_t* codes, int64_t i) {
  const uint8_t* p = codes + code_offset(kind, i);
  const u32 nibble = *p >> (i % 2 * 4) & 15;
  switch (kind) {
    case kF32: return load<float>(p);
    case kBF16: return as_float((u32)load<uint16_t>(p) << 16);
    case kF16: return f16_value((u32)load<uint16_t>(p));
    case kE4M3: return (*p & 127) == 127 ? as_float(0x7fc00000u) : e4m3_value((u32)*p);
    case kInt4: return int4_value(nibble);
    default: return e2m1_value(nibble);
  }
}

// 2 * LANES values under one scale, by kind: `in_order` gives elements 0 .. LANES - 1 and the rest, `in_turn` the even
// and the odd ones. Neighbours in different vectors are what INT4's packing wants, and cheap where two share a word.
template <int kind>
struct Scaled {  // plain kinds: no scale
  LANE_MEMBER explicit Scaled(float) {}
  LANE_MEMBER Floats at(const uint8_t* p) const {
    if (kind == kF32) return load<Floats>(p);
    if (kind == kBF16) return as_float(widen(load<Halves>(p)) << 16);
#if LANES > 4
    return half_values(load<Halves>(p));
#else
    return f16_value(widen(load<Halves>(p)));
#endif
  }
  LANE_MEMBER void in_order(const uint8_t* p, Floats& first, Floats& second) const {
    first = at(p);
    second = at(p + code_offset(kind, LANES));
  }
  LANE_MEMBER void in_turn(const uint8_t* p, Floats& even, Floats& odd) const {
    if (kind == kBF16) {
      const Words both = load<Words>(p);
      even = as_float(both << 16);
      odd = as_float(both & 0xffff0000u);
    } else {
      take_turns(at(p), at(p + code_offset(kind, LANES)), even, odd);
    }
  }
};

template <>
struct Scaled<kE4M3> {
#if LANES > 4
  // An e4m3 code shifted into the place of an F16 one is the value / 256, subnormals included; the product with
  // 256 * scale is rounded once, like that of value and scale.
  Floats scale;
  LANE_MEMBER explicit Scaled(float s) : scale(splat<Floats>(s * 256.0f)) {}
  LANE_MEMBER Floats at(const uint8_t* p) const {
    return half_values((widen_signed(load<Bytes>(p)) << 7) & (uint16_t)0xbf80) * scale;
  }
#else
  Floats scale;
  LANE_MEMBER explicit Scaled(float s) : scale(splat<Floats>(s)) {}
  LANE_MEMBER Floats at(const uint8_t* p) const { return e4m3_value(widen(load<Bytes>(p))) * scale; }
#endif
  LANE_MEMBER void in_order(const uint8_t* p, Floats& first, Floats& second) const {
    first = at(p);
    second = at(p + LANES);
  }
  LANE_MEMBER void in_turn(const uint8_t* p, Floats& even, Floats& odd) const {
#if LANES > 4
    const Halves both = load<Halves>(p);
    even = half_values(((both << 8) & (uint16_t)0x8000) | ((both << 7) & (uint16_t)0x3f80)) * scale;
    odd = half_values((both & (uint16_t)0x8000) | ((both >> 1) & (uint16_t)0x3f80)) * scale;
#else
    take_turns(at(p), at(p + LANES), even, odd);
#endif
  }
};

template <int kind>
struct ScaledNibbles {  // the even element is the low half of a byte
#if LANES == 16         // sixteen codes are a vector's lanes: the products are looked up
  Floats products;
  LANE_MEMBER explicit ScaledNibbles(float s) {
    constexpr Floats int4 = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    constexpr Floats e2m1 = {0, .5, 1, 1.5, 2, 3, 4, 6, -0.f, -.5, -1, -1.5, -2, -3, -4, -6};
    products = (kind == kInt4 ? int4 : e2m1) * s;
  }
  LANE_MEMBER Floats look_up(Words nibble) const { return _mm512_permutexvar_ps((__m512i)nibble, products); }
#else
  Floats scale;
  LANE_MEMBER explicit ScaledNibbles(float s) : scale(splat<Floats>(s)) {}
  LANE_MEMBER Floats look_up(Words nibble) const {
    return (kind == kInt4 ? int4_value(nibble & 15u) : e2m1_value(nibble)) * scale;
  }
#endif
  LANE_MEMBER void in_turn(const uint8_t* p, Floats& even, Floats& odd) const {
    const Words both = widen(load<Bytes>(p));
    even = look_up(both);
    odd = look_up(both >> 4);
  }
  LANE_MEMBER void in_order(const uint8_t* p, Floats& first, Floats& second) const {
    Floats even, odd;
    in_turn(p, even, odd);
    first = interleave_low(even, odd);
    second = interleave_high(even, odd);
  }
};
template <>
struct Scaled<kInt4> : ScaledNibbles<kInt4> {
  LANE_MEMBER explicit Scaled(float s) : ScaledNibbles<kInt4>(s) {}
};
template <>
struct Scaled<kE2M1> : ScaledNibbles<kE2M1> {
  LANE_MEMBER explicit Scaled(float s) : ScaledNibbles<kE2M1>(s) {}
};

constexpr int kChunk = 2 * LANES;

// n elements from element i on, under one scale. What is left after whole chunks goes one by one, and so does e4m3
// under an enormous scale. `in_turn`: the even elements of a chunk come before the odd ones; all chunks are whole.
template <int kind, bool in_turn>
LANE_INLINE void decode_run(const uint8_t* codes, int64_t i, int64_t n, float scale, float* out) {
  const Scaled<kind> scaled(scale);
  const uint8_t* p = codes + code_offset(kind, i);
  int64_t j = 0;
  if (kind != kE4M3 || (bits(scale) & 0x7fffffffu) < 0x7b000000u)  // 2^119
    for (; j + kChunk <= n; j += kChunk) {
      Floats first, second;
      if (in_turn) scaled.in_turn(p + code_offset(kind, j), first, second);
      else scaled.in_order(p + code_offset(kind, j), first, second);
      store(out + j, first);
      store(out + j + LANES, second);
    }
  for (; j < n; j++) {
    const float code = code_value(kind, codes, i + j);
    const int64_t place = in_turn ? j / kChunk * kChunk + j % kChunk / 2 + j % 2 * LANES : j;
    out[place] = kind < kE4M3 ? code : code * scale;
  }
}

template <int kind, bool in_turn>
LANE_INLINE void decode_scaled(const Matrix& m, int64_t row, int64_t column, int64_t n, float* out) {
  int64_t block = column / m.block_cols, end = (block + 1) * m.block_cols - column;
  const int64_t i = row * m.cols + column, line = (m.block_rows == 1 ? row : row / m.block_rows) * scale_columns(m);
  for (int64_t done = 0; done < n; block++) {
    if (end > n) end = n;
    const float scale = scale_value(m.scale_kind, m.scales, line + block);
    if (end - done == 32) decode_run<kind, in_turn>(m.codes, i + done, 32, scale, out + done);
    else decode_run<kind, in_turn>(m.codes, i + done, end - done, scale, out + done);
    done = end;
    end += m.block_cols;
  }
}

// Columns [column, column + n) of a row as float32. NaN codes of e4m3 may read as numbers: no_nans() looks for them.
template <bool in_turn = false>
LANE_INLINE void decode(const Matrix& m, int64_t row, int64_t column, int64_t n, float* out) {
  const int64_t i = row * m.cols + column;
  switch (m.kind) {
    case kF32: return decode_run<kF32, in_turn>(m.codes, i, n, 1.0f, out);
    case kBF16: return decode_run<kBF16, in_turn>(m.codes, i, n, 1.0f, out);
    case kF16: return decode_run<kF16, in_turn>(m.codes, i, n, 1.0f, out);
    case kInt4: return decode_scaled<kInt4, in_turn>(m, row, column, n, out);
    case kE2M1: return decode_scaled<kE2M1, in_turn>(m, row, column, n, out);
    default: return decode_scaled<kE4M3, in_turn>(m, row, column, n, out);
  }
}

// The same with the even elements of each chunk before its odd ones; n is a multiple of kChunk.
LANE_INLINE void decode_in_turn(const Matrix& m, int64_t row, int64_t column, int64_t n, float* out) {
  if (m.kind < kE4M3 || m.block_cols % kChunk == 0) return decode<true>(m, row, column, n, out);
  decode(m, row, column, n, out);
  for (int64_t j = 0; j < n; j += kChunk) {
    Floats even, odd;
    take_turns(load<Floats>(out + j), load<Floats>(out + j + LANES), even, odd);
    store(out + j, even);
    store(out + j + LANES, odd);
  }
}

LANE_TYPE(WideBytes, uint8_t, 4 * LANES);
LANE_TYPE(WideHalves, uint16_t, 4 * LANES);

// Largest magnitude of n stored values, as bits: `mask` takes the sign off, `zero` is xor-ed first.
template <class V, class E>
LANE_INLINE u32 largest_code(const uint8_t* codes, int64_t n, E mask, E zero) {
  constexpr int lanes = sizeof(V) / sizeof(E);
  V top = {};
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes) {
    const V code = (load<V>(codes + j * sizeof(E)) ^ zero) & mask;
    top = code > top ? code : top;
  }
  E best = 0;
  for (int i = 0; i < lanes; i++) best = top[i] > best ? top[i] : best;
  for (; j < n; j++) {
    const E code = (load<E>(codes + j * sizeof(E)) ^ zero) & mask;
    best = code > best ? code : best;
  }
  return best;
}

LANE_INLINE bool no_nans(const Matrix& m, int64_t row, int64_t column, int64_t n) {
  return m.kind != kE4M3 || largest_code<WideBytes, uint8_t>(m.codes + row * m.cols + column, n, 0x7f, 0) < 127;
}
