// What the threads of a block do together: which elements are whose, the largest of all, and what the block leaves.

// A thread's four vectors: columns col .. col + 7 of every step-th row from `row` on. Of those that are not `inside` the
// matrix, nothing is read or written; their elements count as zeros.
struct Patch {
  u32 row, step, col, rows, cols;
  PHASEFOLD_INLINE Patch(const Job& job, u32 r, u32 s, u32 c) : row(r), step(s), col(c), rows(job.rows), cols(job.cols) {}
  PHASEFOLD_INLINE u32 row_of(u32 j) const { return row + j * step; }
  PHASEFOLD_INLINE bool inside(u32 j) const { return row_of(j) < rows && col < cols; }
  PHASEFOLD_INLINE u32 element(u32 j) const { return row_of(j) * cols + col; }
};

// Of 256 threads: 32 rows x 256 columns, a warp beside each row.
PHASEFOLD_INLINE Patch wide_patch(const Job& job, u32 tile) {
  const u32 across = (job.cols + kRowsWide - 1) / kRowsWide, down = tile / across;
  return Patch(job, down * kRowsHigh + threadIdx.x / 32, kRowsHigh / 4,
               (tile - down * across) * kRowsWide + threadIdx.x % 32 * kVector);
}

// Of 512 threads: 128 rows x 128 columns, sixteen threads beside each row.
PHASEFOLD_INLINE Patch square_patch(const Job& job, u32 tile) {
  const u32 across = (job.cols + kScaleBlock - 1) / kScaleBlock, down = tile / across;
  return Patch(job, down * kScaleBlock + threadIdx.x / 16, kScaleBlock / 4,
               (tile - down * across) * kScaleBlock + threadIdx.x % 16 * kVector);
}

// All four reads come before any use, so that they are under way together.
template <int kind>
PHASEFOLD_INLINE void read_patch(const Job& job, const Patch& patch, Codes<kind> (&codes)[4]) {
#pragma unroll
  for (u32 j = 0; j < 4; j++) codes[j] = read<kind>(job.codes, patch.element(j), patch.inside(j));
}

template <int kind>
PHASEFOLD_INLINE u32 decode_patch(const Job& job, const Patch& patch, const Codes<kind>& codes, u32 j,
                                  float (&x)[kVector], Found& found) {
  return decode<kind>(job, codes, patch.row_of(j), patch.col, patch.inside(j), x, found);
}

constexpr u32 kAll = 0xffffffffu;  // threads of a warp

// Of n neighbours of a warp; each of them learns it.
template <int n>
PHASEFOLD_INLINE u32 max_of_neighbours(u32 x) {
#pragma unroll
  for (int i = n / 2; i; i /= 2) x = larger(x, __shfl_xor_sync(kAll, x, i));
  return x;
}

template <int threads>
PHASEFOLD_INLINE u32 max_of_block(u32 x) {
  __shared__ u32 of_warps[threads / 32];
  x = max_of_neighbours<32>(x);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < threads / 32; i++) x = larger(x, of_warps[i]);
  return x;
}

// What all threads have found, errors added in an order that is always the same. T: of a thread's sums.
template <int threads, class T>
PHASEFOLD_INLINE void write_partial(const Partial& found, T error, T norm, Partial* to) {
  __shared__ T of_warps[2][threads / 32];
#pragma unroll
  for (int i = 16; i; i /= 2) {
    error += __shfl_xor_sync(kAll, error, i);
    norm += __shfl_xor_sync(kAll, norm, i);
  }
  if (threadIdx.x % 32 == 0) {
    of_warps[0][threadIdx.x / 32] = error;
    of_warps[1][threadIdx.x / 32] = norm;
  }
  __syncthreads();
  if (threadIdx.x) return;
  Partial all = found;
  all.error2 = all.norm2 = 0.0;
  for (int i = 0; i < threads / 32; i++) {
    all.error2 += of_warps[0][i];
    all.norm2 += of_warps[1][i];
  }
  *to = all;
}

template <int threads>
PHASEFOLD_INLINE void write_partial(const Found& found, Partial* partials) {
  Partial* own = partials + blockIdx.y * gridDim.x + blockIdx.x;
  write_partial<threads>(found.shared, found.sums.error, found.sums.norm, own);
}
