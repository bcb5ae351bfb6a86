// What one thread does with eight neighbours of a row: read them, decode them, look for faults, add up errors.

constexpr u32 kInfinity = 0x7f800000u;
// amax of the blocks that are done here. Squares of what lies below 2^56, and their sum over a thread block, stay far from
// float's end; below 2^-30 they would be lost, and quotients need care that is wasted on all others.
constexpr u32 kOrdinaryLow = 0x30800000u, kOrdinaryHigh = 0x5b800000u;

PHASEFOLD_INLINE bool ordinary(u32 amax) { return amax == 0 || (amax >= kOrdinaryLow && amax < kOrdinaryHigh); }
PHASEFOLD_INLINE bool rare(u32 amax) { return !ordinary(amax) && amax < kInfinity; }  // from there on it is a fault

// Sums of squares: of a vector first, then of a thread's vectors, so that none is long.
struct Sums {
  float error = 0, norm = 0;
  PHASEFOLD_INLINE void add(float e, float x) {
    error = fused(e, e, error);
    norm = fused(x, x, norm);
  }
  PHASEFOLD_INLINE void add(const Sums& more) {
    error += more.error;
    norm += more.norm;
  }
};

// What the threads of a block find. Sums are each thread's own; what seldom is lies in shared memory, so that it costs
// no registers, and is put together by atomics of integers, whose order does not matter.
struct Found {
  Partial& shared;
  Sums sums;
  // All threads begin together: what is `read` before this is under way meanwhile.
  PHASEFOLD_INLINE explicit Found(Partial& of_block) : shared(of_block) {
    if (threadIdx.x == 0) shared = Partial{kNoFault};
    __syncthreads();
  }
  PHASEFOLD_INLINE void note(u64 fault, u64 index) { atomicMin(&shared.fault, fault_key(fault, index)); }
  PHASEFOLD_INLINE void count(u32& what) { atomicAdd(&what, 1u); }
};

constexpr int kFirstScaled = kE4M3;  // kinds from here on have scales

PHASEFOLD_INLINE constexpr int bits_of(int kind) {
  return kind == kF32 ? 32 : kind < kFirstScaled ? 16 : kind == kE4M3 ? 8 : 4;
}

// n words that are read and written at once, 16 bytes an instruction at most.
template <int n>
struct alignas(n >= 4 ? 16 : 4 * n) Words {
  u32 word[n];
};

// Eight elements as they are stored: 32 bytes of F32 down to 4 bytes of INT4.
template <int kind>
using Codes = Words<bits_of(kind) * (int)kVector / 32>;

// The vector that begins with this element; codes of zero where it is not `inside` the matrix.
template <int kind>
PHASEFOLD_INLINE Codes<kind> read(const u8* codes, u32 element, bool inside) {
  if (inside) return *reinterpret_cast<const Codes<kind>*>(codes + (u64)element * bits_of(kind) / 8);
  Codes<kind> zeros = {};
  if (kind == kInt4) zeros.word[0] = 0x88888888u;
  return zeros;
}

// Codes of a few bits are read by shifting them into the place of an F16's bits, which is exact for subnormals as well:
// that leaves the value divided by this.
PHASEFOLD_INLINE constexpr float unit_of(int kind) { return kind == kE4M3 ? 256.0f : kind == kE2M1 ? 16384.0f : 1.0f; }

// Element i / unit_of(kind), without its scale. e4m3's NaN is not known here.
template <int kind>
PHASEFOLD_INLINE float code_value(const Codes<kind>& codes, int i) {
  constexpr int in_word = 32 / bits_of(kind);
  const u32 word = codes.word[i / in_word];
  if (kind == kF32) return as_float(word);
  if (kind == kBF16) return as_float(i % 2 ? word & 0xffff0000u : word << 16);
  if (kind == kF16) return half_value((u16)(i % 2 ? word >> 16 : word));
  if (kind == kE4M3) {  // elements 0 and 2 together, and 1 and 3
    const u32 even = ((word & 0x00800080u) << 8) | ((word & 0x007f007fu) << 7);
    const u32 odd = (word & 0x80008000u) | ((word & 0x7f007f00u) >> 1);
    const u32 pair = i % 2 ? odd : even;
    return half_value((u16)(i % 4 / 2 ? pair >> 16 : pair));
  }
  const u32 nibble = (word >> (i % 8 * 4)) & 15u;
  return kind == kInt4 ? int4_value(nibble) : half_value((u16)((nibble & 8u) << 12 | (nibble & 7u) << 9));
}

// Is there a code 127 (or -127), e4m3's NaN, in the word?
PHASEFOLD_INLINE bool any_nan(u32 word) { return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; }

PHASEFOLD_INLINE float scale_value(u32 kind, const u8* scales, u32 i) {
  switch (kind) {
    case kF32: return reinterpret_cast<const float*>(scales)[i];
    case kBF16: return as_float((u32) reinterpret_cast<const u16*>(scales)[i] << 16);
    case kF16: return half_value(reinterpret_cast<const u16*>(scales)[i]);
    default: return e8m0_value(scales[i]);
  }
}

// The vector at (row, col) -> x. Returns its scale. Times 2^100 or more it may be infinite here: see `note_faults`.
template <int kind>
PHASEFOLD_INLINE float decode_values(const Job& job, const Codes<kind>& codes, u32 row, u32 col, bool inside,
                              float (&x)[kVector]) {
  float scale = 1.0f;
  if (kind >= kFirstScaled && inside)
    scale = scale_value(job.scale_kind, job.scales, (row >> job.row_shift) * job.scale_cols + (col >> job.col_shift));
#pragma unroll
  for (int i = 0; i < (int)kVector; i++) {
    x[i] = code_value<kind>(codes, i);
    if (kind >= kFirstScaled) x[i] *= scale * unit_of(kind);
  }
  return scale;
}

// A scale outside 2^-126 .. 2^100: a fault, or to be counted once for its block, or too large for `decode_values`.
template <int kind>
PHASEFOLD_INLINE void note_odd_scale(const Job& job, const Codes<kind>& codes, u32 row, u32 col, float scale,
                                    Found& found) {
  const u32 row_mask = (1u << job.row_shift) - 1, col_mask = (1u << job.col_shift) - 1;
  const u32 magnitude = bits(scale) & 0x7fffffffu;
  bool zeros = true;
#pragma unroll
  for (int i = 0; i < (int)kVector; i++) zeros &= code_value<kind>(codes, i) == 0.0f;
  const u32 fault = magnitude >= kInfinity ? kScale : scale < 0.0f ? kNegative : magnitude == 0 ? kZeroScale : kNone;
  if (fault == kNone && magnitude >= 0x00800000u) found.count(found.shared.rare);
  else if (fault == kNone) {
    if (!(row & row_mask) && !(col & col_mask)) found.count(found.shared.tiny_scales);
  } else if (fault != kZeroScale || !zeros)
    found.note(fault, (row >> job.row_shift) * job.scale_cols + (col >> job.col_shift));
}

// Notes what is wrong with the scale or the elements of a vector. Returns the bits of the largest magnitude.
template <int kind>
PHASEFOLD_INLINE u32 note_faults(const Job& job, const Codes<kind>& codes, u32 row, u32 col, float scale,
                             const float (&x)[kVector], Found& found) {
  if (kind >= kFirstScaled && bits(scale) - 0x00800000u >= 0x71000000u)
    note_odd_scale<kind>(job, codes, row, col, scale, found);
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < (int)kVector; i++) top = larger(top, bits(x[i]) & 0x7fffffffu);
  bool faulty = top >= kInfinity;
  if constexpr (kind == kE4M3) faulty |= any_nan(codes.word[0]) || any_nan(codes.word[1]);
  if (!faulty) return top;
  u32 first = kVector;
#pragma unroll
  for (int i = (int)kVector - 1; i >= 0; i--) {
    bool bad = (bits(x[i]) & 0x7fffffffu) >= kInfinity;
    if constexpr (kind == kE4M3) bad |= any_nan(codes.word[i / 4] >> (i % 4 * 8) & 0xffu);
    if (bad) first = i;
  }
  found.note(kWeight, row * job.cols + col + first);
  return kInfinity;
}

// Decode a vector and note its faults. Returns the bits of its largest magnitude.
template <int kind>
PHASEFOLD_INLINE u32 decode(const Job& job, const Codes<kind>& codes, u32 row, u32 col, bool inside,
                            float (&x)[kVector], Found& found) {
  const float scale = decode_values<kind>(job, codes, row, col, inside, x);
  return note_faults<kind>(job, codes, row, col, scale, x, found);
}
