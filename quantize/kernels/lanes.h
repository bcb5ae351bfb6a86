// Vectors of LANES values for codec.h: GCC's vector extension, and intrinsics where it has no word for an operation.
// Included by cpu.cpp once for each instruction set, before codec.h, whose templates find these functions.

#define LANE_TYPE(name, element, bytes) typedef element name __attribute__((vector_size(bytes)))

LANE_TYPE(Floats, float, 4 * LANES);
LANE_TYPE(Words, uint32_t, 4 * LANES);
LANE_TYPE(Masks, int32_t, 4 * LANES);
LANE_TYPE(Halves, uint16_t, 2 * LANES);
LANE_TYPE(Bytes, uint8_t, LANES);
LANE_TYPE(Pairs, uint64_t, 4 * LANES);  // two neighbouring words
LANE_TYPE(HalfFloats, float, 2 * LANES);
LANE_TYPE(Doubles, double, 4 * LANES);

#define LANE_INLINE static inline __attribute__((always_inline))
#define LANE_MEMBER __attribute__((always_inline))

LANE_INLINE Words bits(Floats x) { return (Words)x; }
LANE_INLINE Floats as_float(Words u) { return (Floats)u; }
LANE_INLINE Floats select(Masks mask, Floats yes, Floats no) { return mask ? yes : no; }
LANE_INLINE Words select(Masks mask, Words yes, Words no) { return mask ? yes : no; }

template <class V>
LANE_INLINE V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
LANE_INLINE void store(void* to, V v) {
  memcpy(to, &v, sizeof v);
}

// What the extension has no word for, or what GCC takes apart lane by lane. Unsigned maximum and minimum: all values
// that meet there are bits of non-negative floats or small counts. Narrowing: every value fits the narrow type.
#if LANES == 16
LANE_INLINE Words larger(Words a, Words b) { return (Words)_mm512_max_epi32((__m512i)a, (__m512i)b); }
LANE_INLINE Words smaller(Words a, Words b) { return (Words)_mm512_min_epi32((__m512i)a, (__m512i)b); }
LANE_INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
LANE_INLINE Floats root(Floats x) { return _mm512_sqrt_ps(x); }
LANE_INLINE Words widen(Bytes v) { return (Words)_mm512_cvtepu8_epi32((__m128i)v); }
LANE_INLINE Words widen(Halves v) { return (Words)_mm512_cvtepu16_epi32((__m256i)v); }
LANE_INLINE Doubles widen(HalfFloats v) { return _mm512_cvtps_pd(v); }
LANE_INLINE Floats half_values(Halves v) { return _mm512_cvtph_ps((__m256i)v); }
LANE_INLINE Halves widen_signed(Bytes v) { return (Halves)_mm256_cvtepi8_epi16((__m128i)v); }
LANE_INLINE void store_bytes(void* to, Words v) { store(to, _mm512_cvtepi32_epi8((__m512i)v)); }
LANE_INLINE void store_halves(void* to, Words v) { store(to, _mm512_cvtepi32_epi16((__m512i)v)); }
#elif LANES == 8
LANE_INLINE Words larger(Words a, Words b) { return (Words)_mm256_max_epi32((__m256i)a, (__m256i)b); }
LANE_INLINE Words smaller(Words a, Words b) { return (Words)_mm256_min_epi32((__m256i)a, (__m256i)b); }
LANE_INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
LANE_INLINE Floats root(Floats x) { return _mm256_sqrt_ps(x); }
LANE_INLINE Words widen(Bytes v) { return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)&v)); }
LANE_INLINE Words widen(Halves v) { return (Words)_mm256_cvtepu16_epi32((__m128i)v); }
LANE_INLINE Doubles widen(HalfFloats v) { return _mm256_cvtps_pd(v); }
LANE_INLINE Floats half_values(Halves v) { return _mm256_cvtph_ps((__m128i)v); }
LANE_INLINE Halves widen_signed(Bytes v) { return (Halves)_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)&v)); }
LANE_INLINE __m128i packed(__m256i v) {  // eight words -> halves
  return _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}
LANE_INLINE void store_bytes(void* to, Words v) {
  const __m128i halves = packed((__m256i)(v & 0xffu));
  _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(halves, halves));
}
LANE_INLINE void store_halves(void* to, Words v) { store(to, packed((__m256i)v)); }
#else
LANE_INLINE Words larger(Words a, Words b) { return a > b ? a : b; }
LANE_INLINE Words smaller(Words a, Words b) { return a < b ? a : b; }
LANE_INLINE Floats fused(Floats a, Floats b, Floats c) { return a * b + c; }  // sums only: never where bits matter
LANE_INLINE Floats root(Floats x) {
  for (int i = 0; i < LANES; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
}
LANE_INLINE Words widen(Bytes v) { return __builtin_convertvector(v, Words); }
LANE_INLINE Words widen(Halves v) { return __builtin_convertvector(v, Words); }
LANE_INLINE Doubles widen(HalfFloats v) { return __builtin_convertvector(v, Doubles); }
LANE_INLINE void store_bytes(void* to, Words v) { store(to, __builtin_convertvector(v, Bytes)); }
LANE_INLINE void store_halves(void* to, Words v) { store(to, __builtin_convertvector(v, Halves)); }
#endif

// What codec.h's search asks for. Without an FMA the one rounding is had from doubles: products of two floats are exact
// there, and adding 1.5 * 2^52 leaves an integer.
#if LANES > 4
LANE_INLINE Floats biased_product(Floats x, Floats inverse) { return fused(x, inverse, Floats{} + 12582920.0f); }
LANE_INLINE Floats minus_exact_product(Floats x, Floats q, Floats scale) { return fused(-q, scale, x); }
#else
LANE_INLINE Floats biased_product(Floats x, Floats inverse) {
  for (int i = 0; i < LANES; i++)
    x[i] = (float)((double)x[i] * inverse[i] + 6755399441055744.0 - 6755399441055744.0) + 12582920.0f;
  return x;
}
LANE_INLINE Floats minus_exact_product(Floats x, Floats q, Floats scale) { return x - q * scale; }
#endif

// Lane order a0 b0 a1 b1 ... of the lower and of the upper halves.
template <class V>
LANE_INLINE V interleave_low(V a, V b) {
#if LANES == 16
  return (V)__builtin_shuffle((Words)a, (Words)b, Words{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
#elif LANES == 8
  return (V)__builtin_shuffle((Words)a, (Words)b, Words{0, 8, 1, 9, 2, 10, 3, 11});
#else
  return V{a[0], b[0], a[1], b[1]};
#endif
}

template <class V>
LANE_INLINE V interleave_high(V a, V b) {
#if LANES == 16
  return (V)__builtin_shuffle((Words)a, (Words)b, Words{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#elif LANES == 8
  return (V)__builtin_shuffle((Words)a, (Words)b, Words{4, 12, 5, 13, 6, 14, 7, 15});
#else
  return V{a[2], b[2], a[3], b[3]};
#endif
}

// The inverse of these two: even lanes of a and b, and odd ones.
LANE_INLINE void take_turns(Floats a, Floats b, Floats& even, Floats& odd) {
#if LANES == 16
  even = __builtin_shuffle(a, b, Masks{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30});
  odd = __builtin_shuffle(a, b, Masks{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
#elif LANES == 8
  even = __builtin_shuffle(a, b, Masks{0, 2, 4, 6, 8, 10, 12, 14});
  odd = __builtin_shuffle(a, b, Masks{1, 3, 5, 7, 9, 11, 13, 15});
#else
  even = Floats{a[0], a[2], b[0], b[2]};
  odd = Floats{a[1], a[3], b[1], b[3]};
#endif
}

// rows[i][j] <-> rows[j][i]: interleaving row i with row i + LANES / 2, as often as LANES has bits.
LANE_INLINE void transpose(Floats* rows) {
#pragma GCC unroll 4
  for (int step = 1; step < LANES; step *= 2) {
    Floats next[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) {
      next[2 * i] = interleave_low(rows[i], rows[i + LANES / 2]);
      next[2 * i + 1] = interleave_high(rows[i], rows[i + LANES / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = next[i];
  }
}

// Lane i of the result: the largest word of rows[i].
LANE_INLINE Words largest_of_each(Words* rows) {
#pragma GCC unroll 4
  for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; i++)
      rows[i] = larger(interleave_low(rows[i], rows[i + half]), interleave_high(rows[i], rows[i + half]));
  return rows[0];
}

LANE_INLINE bool any(Words v) {
  const Pairs pairs = (Pairs)v;
  uint64_t all = 0;
  for (int i = 0; i < LANES / 2; i++) all |= pairs[i];
  return all != 0;
}

LANE_INLINE uint32_t largest(Words v) {
  uint32_t best = 0;
  for (int i = 0; i < LANES; i++) best = v[i] > best ? v[i] : best;
  return best;
}

LANE_INLINE Doubles halves_added(Floats v) {
  struct {
    HalfFloats low, high;
  } half = load<decltype(half)>(&v);
  return widen(half.low) + widen(half.high);
}

LANE_INLINE double total(Doubles v) {
  double sum = 0;
  for (int i = 0; i < LANES / 2; i++) sum += v[i];
  return sum;
}
