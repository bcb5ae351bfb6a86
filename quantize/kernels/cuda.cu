// CUDA kernels: what cpu.cpp does with a row block, for many of them in one launch.
//
// The arithmetic is codec.h's: codes and scales are those of the CPU, bit for bit. Sums of errors are added in another
// order and agree to about 1e-6. NVRTC compiles this at first use (build.py), so nothing of CUDA's own is included; the
// tests compile it for the host and walk blocks and threads. Each thread block leaves a Partial, sum_partials adds them in
// an order that is always the same, and two runs leave the same bytes.
//
// "Moves": bytes read and written for an element, codes and scales.

#include "kinds.h"
#include "codec.h"
#include "job.h"
#include "device.h"
#include "block.h"
#include "group.h"

// Any source -> BF16. Moves 2 + its own: 4 from BF16 or F16, 3 from FP8, 2.56 from INT4 g32.
// Tile: a warp reads 256 columns of a row, half a kilobyte of BF16, and each thread four rows of them at once: 64 bytes
// of BF16 in flight a thread, or 16 of INT4.
template <int kind>
__global__ void __launch_bounds__(256) to_bf16(const Job* __restrict__ jobs, u64, Partial* partials) {
  const Job& job = jobs[blockIdx.y];
  const Patch patch = wide_patch(job, blockIdx.x);
  Codes<kind> codes[4];
  read_patch<kind>(job, patch, codes);
  __shared__ Partial shared;
  Found found(shared);
#pragma unroll
  for (u32 j = 0; j < 4; j++) {
    float x[kVector];
    const u32 top = decode_patch<kind>(job, patch, codes[j], j, x, found);
    if (rare(top)) found.count(found.shared.rare);  // what BF16 cannot hold, too
    const u32 element = patch.element(j);
    Words<4> out;
    Sums sums;
#pragma unroll
    for (int i = 0; i < (int)kVector; i += 2) {
      const u32 low = bf16_bits(bits(x[i])), high = bf16_bits(bits(x[i + 1]));
      out.word[i / 2] = low >> 16 | high;
      sums.add(x[i] - as_float(low), x[i]);
      sums.add(x[i + 1] - as_float(high), x[i + 1]);
    }
    found.sums.add(sums);
    if (patch.inside(j)) *reinterpret_cast<Words<4>*>(job.out_codes + 2ull * element) = out;
  }
  write_partial<256>(found, partials);
}

// The second half of to_e4m3_blocks, for one way of rounding scales: the codes.
template <int kind, class Encode>
PHASEFOLD_INLINE void encode_patch(const Job& job, const Patch& patch, const Encode& encode, Found& found) {
#pragma unroll 1
  for (u32 j = 0; j < 4 && patch.inside(j); j++) {
    float x[kVector];
    decode_values<kind>(job, read<kind>(job.codes, patch.element(j), true), patch.row_of(j), patch.col, true, x);
    *reinterpret_cast<Words<2>*>(job.out_codes + patch.element(j)) = encode(x, found);
  }
}

// Any source -> FP8 in blocks of 128 x 128. Moves 1 + its own: 3 from BF16, 1.56 from INT4 g32.
// Layout: e4m3 codes row by row, float32 scales [rows / 128, cols / 128], rounded up.
// Tile: a scale's block, by 512 threads. It is read twice: what the first pass leaves in L1 (32 KB of BF16) costs fewer
// registers than holding it, and with 40 a thread three thread blocks share a multiprocessor (sm_90a).
template <int kind>
__global__ void __launch_bounds__(512) to_e4m3_blocks(const Job* __restrict__ jobs, u64, Partial* partials) {
  const Job& job = jobs[blockIdx.y];
  const Patch patch = square_patch(job, blockIdx.x);
  Codes<kind> codes[4];
  read_patch<kind>(job, patch, codes);
  __shared__ Partial shared;
  Found found(shared);
  u32 top = 0;
#pragma unroll
  for (u32 j = 0; j < 4; j++) {
    float x[kVector];
    top = larger(top, decode_patch<kind>(job, patch, codes[j], j, x, found));
  }
  const float amax = as_float(max_of_block<512>(top)), scale = e4m3_scale(amax, job.power_of_two);
  if (threadIdx.x == 0) write_e4m3_scale(job, scale, bits(amax), found);
  if (job.power_of_two) encode_patch<kind>(job, patch, E4M3<true>(scale), found);
  else encode_patch<kind>(job, patch, E4M3<false>(scale), found);
  write_partial<512>(found, partials);
}

// The second half of to_e4m3_channels.
template <int kind, class Encode>
PHASEFOLD_INLINE void encode_row(const Job& job, const Encode& encode, Found& found) {
  const u32 start = blockIdx.x * job.cols;
  for (u32 col = threadIdx.x * kVector; col < job.cols; col += 256 * kVector) {
    float x[kVector];
    decode_values<kind>(job, read<kind>(job.codes, start + col, true), blockIdx.x, col, true, x);
    *reinterpret_cast<Words<2>*>(job.out_codes + start + col) = encode(x, found);
  }
}

// Any source -> FP8 with a scale a row. Moves 1 + its own: 3 from BF16.
// Layout: e4m3 codes row by row, float32 scales [rows, 1].
// Tile: a row, whose length is anybody's guess: it is read twice. 7168 BF16 are 14 KB, which the first pass leaves in L1.
// 256 threads take it in 3.5 turns, one vector in flight a thread: eight thread blocks a multiprocessor make up for that.
template <int kind>
__global__ void __launch_bounds__(256) to_e4m3_channels(const Job* __restrict__ jobs, u64, Partial* partials) {
  const Job& job = jobs[blockIdx.y];
  const u32 start = blockIdx.x * job.cols;
  const u32 first = threadIdx.x * kVector, step = 256 * kVector;
  __shared__ Partial shared;
  Found found(shared);
  float x[kVector];
  u32 top = 0;
  for (u32 col = first; col < job.cols; col += step) {
    const Codes<kind> codes = read<kind>(job.codes, start + col, true);
    top = larger(top, decode<kind>(job, codes, blockIdx.x, col, true, x, found));
  }
  const float amax = as_float(max_of_block<256>(top)), scale = e4m3_scale(amax, job.power_of_two);
  if (threadIdx.x == 0) write_e4m3_scale(job, scale, bits(amax), found);
  if (job.power_of_two) encode_row<kind>(job, E4M3<true>(scale), found);
  else encode_row<kind>(job, E4M3<false>(scale), found);
  write_partial<256>(found, partials);
}

// Any source -> INT4 in groups of a row, by RTN or as the exact inverse of bf16(q * s). Moves 0.5 + 2 / group + its own:
// 2.56 from BF16 at g32, 1.52 from FP8 at g128.
// Layout: compressed-tensors' pack-quantized: element i of a vector in bits 4i .. 4i + 3 of its word, plus 8; BF16 scales
// [rows, cols / group].
// Tile: that of to_bf16. A group is 4, 8 or 16 neighbours of a warp, which find its amax by shuffles; each packs a word.
template <int kind, int group, int method>
__global__ void __launch_bounds__(256) to_int4(const Job* __restrict__ jobs, u64, Partial* partials) {
  const Job& job = jobs[blockIdx.y];
  const Patch patch = wide_patch(job, blockIdx.x);
  Codes<kind> codes[4];
  read_patch<kind>(job, patch, codes);
  __shared__ Partial shared;
  Found found(shared);
#pragma unroll
  for (u32 j = 0; j < 4; j++) {
    float x[kVector];
    const u32 own = decode_patch<kind>(job, patch, codes[j], j, x, found);
    const u32 top = max_of_neighbours<group / (int)kVector>(own);
    const float amax = as_float(top);
    const float scale = method == kInverse ? inverse_scale<group>(x, amax) : int4_scale(amax, divisor(0));
    if (patch.inside(j)) {  // whole groups are, or are not
      const u32 element = patch.element(j);
      if (patch.col % group == 0) write_int4_scale<group>(job, element, scale, top, found);
      if (method == kInverse)
#pragma unroll
        for (int i = 0; i < (int)kVector; i++)
          if (bits(x[i]) == 0x80000000u) found.count(found.shared.negative_zeros);
      const Int4<method> encode(scale);
      *reinterpret_cast<u32*>(job.out_codes + element / 2) = encode(x, found);
    }
  }
  write_partial<256>(found, partials);
}

// Any source -> INT4 in groups of a row, under the best of nine scales. Layout and bytes are those of to_int4; but some 125
// instructions an element bind it, not memory.
// Tile: 64 groups, one for each thread, since a group's errors must be added in the order of its elements. Warps read
// 256 columns of a row as elsewhere and hand the elements over through shared memory: 8, 16 or 33 KB.
template <int kind, int group>
__global__ void __launch_bounds__(64) search_int4(const Job* __restrict__ jobs, u64, Partial* partials) {
  constexpr u32 in_row = kRowsWide / group, high = 64 / in_row;
  // One more, so that what threads read together lies in different banks. Writes meet, 2 at a bank at g64 and 4 at g128,
  // which is nothing beside the arithmetic.
  __shared__ float staged[64][group + 1];
  const Job& job = jobs[blockIdx.y];
  const u32 across = (job.cols + kRowsWide - 1) / kRowsWide, down = blockIdx.x / across;
  const u32 above = down * high, left = (blockIdx.x - down * across) * kRowsWide;
  __shared__ Partial shared;
  Found found(shared);
#pragma unroll 1
  for (u32 first = 0; first < high; first += 8) {  // two warps, four rows each
    const Patch patch(job, above + first + threadIdx.x / 32, 2, left + threadIdx.x % 32 * kVector);
    Codes<kind> codes[4];
    read_patch<kind>(job, patch, codes);
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      float x[kVector];
      decode_patch<kind>(job, patch, codes[j], j, x, found);
      const u32 place = patch.col - left;
      float* to = &staged[(patch.row_of(j) - above) * in_row + place / group][place % group];
#pragma unroll
      for (int i = 0; i < (int)kVector; i++) to[i] = x[i];
    }
  }
  __syncthreads();
  const Patch own(job, above + threadIdx.x / in_row, 0, left + threadIdx.x % in_row * group);
  if (own.inside(0)) {
    const float* x = staged[threadIdx.x];
    u32 top = 0;
#pragma unroll 8
    for (int i = 0; i < group; i++) top = larger(top, bits(x[i]) & 0x7fffffffu);
    const float* weights = job.column_weights ? job.column_weights + own.col : nullptr;
    const float scale = best_scale<group>(x, as_float(top), (int)job.objective, weights);
    const u32 element = own.element(0);
    write_int4_scale<group>(job, element, scale, top, found);
    const Int4<kSearch> encode(scale);
#pragma unroll 1
    for (int i = 0; i < group; i += (int)kVector) {
      float some[kVector];
#pragma unroll
      for (int k = 0; k < (int)kVector; k++) some[k] = x[i + k];
      *reinterpret_cast<u32*>(job.out_codes + (element + i) / 2) = encode(some, found);
    }
  }
  write_partial<64>(found, partials);
}

// The Partials of each job, `tiles` of them, in one: thread t adds every 256th, then the threads' sums are added. Moves 40
// bytes a tile, of 8,192 weights or more but for a row's and the search's: one thread block a job is enough.
__global__ void __launch_bounds__(256) sum_partials(const Job* __restrict__ jobs, u64 tiles, Partial* partials) {
  __shared__ Partial shared;
  if (threadIdx.x == 0) shared = Partial{kNoFault};
  __syncthreads();
  double error2 = 0.0, norm2 = 0.0;
  for (u64 i = threadIdx.x; i < tiles; i += 256) {
    const Partial& some = partials[blockIdx.y * tiles + i];
    error2 += some.error2;
    norm2 += some.norm2;
    if (some.fault != kNoFault) atomicMin(&shared.fault, some.fault);
    atomicAdd(&shared.tiny_scales, some.tiny_scales);
    atomicAdd(&shared.zero_blocks, some.zero_blocks);
    atomicAdd(&shared.negative_zeros, some.negative_zeros);
    atomicAdd(&shared.rare, some.rare);
  }
  write_partial<256>(shared, error2, norm2, jobs[blockIdx.y].total);
}
