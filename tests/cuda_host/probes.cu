// Kernels that do what the host card is there to see (test_cuda_driver.py), and some that do not.

typedef unsigned long long u64;
constexpr unsigned lanes = 0xffffffffu;

// Reverses each 64 elements through shared memory.
template <bool barrier>
__global__ void reverse(const float* from, u64, float* to) {
  __shared__ float held[64];
  held[threadIdx.x] = from[blockIdx.x * 64 + threadIdx.x];
  if (barrier) __syncthreads();
  to[blockIdx.x * 64 + threadIdx.x] = held[63 - threadIdx.x];
}

// Sums over warps, twice through the same shared memory.
template <bool barrier>
__global__ void sums(const float* from, u64, float* to) {
  __shared__ float held[2];
  float total = 0;
  for (int turn = 0; turn < 2; turn++) {
    float x = from[turn * 64 + threadIdx.x];
    for (int i = 16; i; i /= 2) x += __shfl_xor_sync(lanes, x, i);
    if (threadIdx.x % 32 == 0) held[threadIdx.x / 32] = x;
    __syncthreads();
    total += held[0] + held[1];
    if (barrier) __syncthreads();
  }
  to[threadIdx.x] = total;
}

template <int how>
__global__ void diverges(const float*, u64, float* to) {
  const unsigned t = threadIdx.x;
  if (how == 0 && t < 32) __syncthreads();
  if (how == 1) {
    if (t < 32) __syncthreads();
    else
      __syncthreads();
  }
  if (how == 2 && t % 2) to[t] = __shfl_xor_sync(lanes, (float)t, 2);
  if (how == 3) to[t] = __shfl_xor_sync(0xffffu, (float)t, 2);
  if (how == 4) to[t] = t % 2 ? __ballot_sync(lanes, 1) : __shfl_xor_sync(lanes, 1u, 2);
  if (how == 5) for (unsigned i = 0; i <= t / 32; i++) __syncthreads();
}

__global__ void copy(const float* from, u64 count, float* to) {
  const u64 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = from[i];
}

// Shared memory as a block finds it; a block leaves numbers in it.
template <int>
__global__ void unwritten(const float*, u64, float* to) {
  __shared__ float held[64];
  to[blockIdx.x * 64 + threadIdx.x] = held[threadIdx.x];
  held[threadIdx.x] = 1.0f;
}

// Threads write their numbers in the order in which they run.
template <int>
__global__ void turns(const float*, u64, float* to) {
  to[(u64)atomicAdd(&to[127], 1.0f)] = (float)(blockIdx.x * 64 + threadIdx.x);
}
