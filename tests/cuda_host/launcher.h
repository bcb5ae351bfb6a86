// CUDA's builtins for a host compiler, and a launch that walks blocks and threads.
//
// Included before a kernel's source, once in each library of kernels (hostcard.py). A block's threads are fibers of one
// operating system's thread: each runs until it waits for the others. What a GPU leaves open is chosen by the caller
// here, the order of blocks, of warps and of a warp's lanes, so that a kernel that lacks a barrier gives other results
// in another order. What a GPU forbids is a fault here: threads that wait at different barriers, or have ended while
// others wait; a shuffle without all lanes of a warp; an address that is not mapped.
//
// Shared memory is thread-local memory: nothing else of the library is, so all of it can be poisoned before each block.

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <link.h>
#include <pthread.h>
#include <utility>
#include <vector>

#include "fibers.h"

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static thread_local
#define __launch_bounds__(...)

struct HostDim {
  unsigned x, y, z;
};
static HostDim threadIdx, blockIdx, blockDim, gridDim;

namespace host {

constexpr unsigned kMostThreads = 1024, kLanes = 32;
constexpr uint32_t kPoison = 0x7ff9a5b7;  // a NaN as float and, twice, as double; no small number as an integer

enum Wait { kAtBarrier, kAtShuffle, kAtVote, kPartly, kEnded };
const char* const kWaits[] = {"waits at a barrier", "waits at a shuffle", "waits at a vote",
                              "waits for some lanes only"};

struct Fiber {
  Place place;
  Wait wait;
  int line;
  const char* file;
};

using Kernel = void (*)(uint64_t, uint64_t, uint64_t);  // every kernel takes three arguments of eight bytes

struct Launch {
  Kernel kernel;
  uint64_t arguments[3];
  uint64_t seed;  // 0: forward, 1: backward, else shuffled
};

static Place scheduler;
static Fiber fibers[kMostThreads];
static uint64_t slots[kMostThreads / kLanes][2][kLanes];  // two, since a lane may be at its next shuffle already
static unsigned char turns[kMostThreads];
static uint8_t* stacks;
static Launch launch;
static uint64_t switches;

inline void yield(Wait wait, int line, const char* file) {
  Fiber& self = fibers[threadIdx.x];
  self.wait = wait;
  self.line = line;
  self.file = file;
  change(self.place, scheduler);
}

inline void body() {
  launch.kernel(launch.arguments[0], launch.arguments[1], launch.arguments[2]);
  yield(kEnded, 0, "");
  __builtin_trap();
}

inline void resume(unsigned thread) {
  threadIdx.x = thread;
  switches++;
  change(scheduler, fibers[thread].place);
}

// Value of all lanes of this thread's warp, when all have come here.
inline const uint64_t* exchange(Wait wait, unsigned mask, uint64_t value, int line, const char* file) {
  const unsigned thread = threadIdx.x, warp = thread / kLanes;
  uint64_t* const slot = slots[warp][turns[thread] ^= 1];
  slot[thread % kLanes] = value;
  yield(mask == 0xffffffffu ? wait : kPartly, line, file);
  return slot;
}

// ---- order

inline uint64_t next_random(uint64_t& state) {
  state += 0x9e3779b97f4a7c15ull;
  uint64_t z = state;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

inline void arrange(std::vector<unsigned>& order, unsigned n, uint64_t& random) {
  order.resize(n);
  for (unsigned i = 0; i < n; i++) order[i] = launch.seed == 1 ? n - 1 - i : i;
  if (launch.seed > 1)
    for (unsigned i = n; i > 1; i--) std::swap(order[i - 1], order[next_random(random) % i]);
}

// ---- a block

static char complaint[512];

struct Told {
  char text[200];
  explicit Told(unsigned thread) {
    const Fiber& fiber = fibers[thread];
    if (fiber.wait == kEnded) snprintf(text, sizeof text, "thread %u has ended", thread);
    else
      snprintf(text, sizeof text, "thread %u %s (%s:%d)", thread, kWaits[fiber.wait], fiber.file, fiber.line);
  }
};

inline bool agree(unsigned a, unsigned b, const char* where) {
  const Fiber &x = fibers[a], &y = fibers[b];
  if (x.wait == y.wait && x.line == y.line && x.file == y.file && x.wait != kPartly) return true;
  snprintf(complaint, sizeof complaint, "block (%u, %u): %s: %s, %s", blockIdx.x, blockIdx.y, where, Told(a).text,
           Told(b).text);
  return false;
}

struct Shared {
  uint8_t* begin;
  size_t size;
};

inline int find_shared(dl_phdr_info* info, size_t, void* found) {
  const auto here = reinterpret_cast<uintptr_t>(&find_shared);
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& part = info->dlpi_phdr[i];
    const uintptr_t start = info->dlpi_addr + part.p_vaddr;
    if (part.p_type != PT_LOAD || here < start || here >= start + part.p_memsz) continue;
    for (int j = 0; j < info->dlpi_phnum; j++)
      if (info->dlpi_phdr[j].p_type == PT_TLS)
        *static_cast<Shared*>(found) = {static_cast<uint8_t*>(info->dlpi_tls_data), info->dlpi_phdr[j].p_memsz};
    return 1;
  }
  return 0;
}

static thread_local uint32_t touched;  // makes sure that this thread has its shared memory

inline Shared shared_memory() {
  volatile uint32_t* touch = &touched;
  *touch = 1;
  Shared shared = {};
  dl_iterate_phdr(find_shared, &shared);
  return shared;
}

inline bool run_block(unsigned threads, const Shared& shared, uint64_t& random) {
  static std::vector<unsigned> warps, lanes;
  for (size_t i = 0; i + 4 <= shared.size; i += 4) memcpy(shared.begin + i, &kPoison, 4);
  for (unsigned i = 0; i < threads; i++) {
    begin_at(fibers[i].place, stack_end(stacks, i), body);
    turns[i] = 0;
  }
  arrange(warps, threads / kLanes, random);
  arrange(lanes, kLanes, random);
  for (;;) {
    for (unsigned warp : warps) {
      const unsigned first = warp * kLanes;
      do {
        for (unsigned lane : lanes) resume(first + lane);
        for (unsigned lane = 0; lane < kLanes; lane++)
          if (!agree(first, first + lane, "a warp diverges")) return false;
      } while (fibers[first].wait == kAtShuffle || fibers[first].wait == kAtVote);
    }
    for (unsigned first = kLanes; first < threads; first += kLanes)
      if (!agree(0, first, "warps diverge")) return false;
    if (fibers[0].wait == kEnded) return true;
  }
}

// ---- faults of the kernel's own

static sigjmp_buf rescue;
static void* volatile fault_address;
static pthread_t runner;
static struct sigaction before_segv, before_bus;

inline void on_fault(int signal, siginfo_t* info, void*) {
  if (!pthread_equal(pthread_self(), runner)) {  // another thread's: as if this were not here
    sigaction(signal, signal == SIGSEGV ? &before_segv : &before_bus, nullptr);
    return;
  }
  fault_address = info->si_addr;
  siglongjmp(rescue, 1);
}

}  // namespace host

inline void __syncthreads(int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  host::yield(host::kAtBarrier, line, file);
}

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int other, int line = __builtin_LINE(),
                         const char* file = __builtin_FILE()) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle is of 4 or 8 bytes");
  uint64_t word = 0;
  memcpy(&word, &value, sizeof value);
  const uint64_t* all = host::exchange(host::kAtShuffle, mask, word, line, file);
  memcpy(&value, all + ((threadIdx.x % host::kLanes) ^ other), sizeof value);
  return value;
}

inline unsigned __ballot_sync(unsigned mask, int yes, int line = __builtin_LINE(),
                              const char* file = __builtin_FILE()) {
  const uint64_t* all = host::exchange(host::kAtVote, mask, yes != 0, line, file);
  unsigned votes = 0;
  for (unsigned i = 0; i < host::kLanes; i++) votes |= (unsigned)all[i] << i;
  return votes;
}

inline int __any_sync(unsigned mask, int yes, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  return __ballot_sync(mask, yes, line, file) != 0;
}

// A thread runs alone until it waits.
template <class T, class U>
inline T atomicAdd(T* at, U value) {
  const T before = *at;
  *at = before + (T)value;
  return before;
}

template <class T, class U>
inline T atomicMin(T* at, U value) {
  const T before = *at;
  if ((T)value < before) *at = (T)value;
  return before;
}

// Runs a whole grid, one caller at a time. Null, or what was wrong; *address is the address of a fault, else null.
// seed: 0 forward, 1 backward, else the seed of a shuffle.
extern "C" const char* host_launch(void* kernel, unsigned grid_x, unsigned grid_y, unsigned threads,
                                   const uint64_t* arguments, uint64_t seed, void** address) {
  using namespace host;
  *address = nullptr;
  if (threads % kLanes || threads > kMostThreads) return "a block is of whole warps, 1024 threads at most";
  if (!stacks) stacks = make_stacks(kMostThreads);
  if (!stacks) return "no memory for the threads' stacks";
  launch = {reinterpret_cast<Kernel>(kernel), {arguments[0], arguments[1], arguments[2]}, seed};
  gridDim = {grid_x, grid_y, 1};
  blockDim = {threads, 1, 1};
  const Shared shared = shared_memory();
  uint64_t random = seed;
  static std::vector<unsigned> blocks;
  arrange(blocks, grid_x * grid_y, random);

  static uint8_t signal_stack[64 * 1024];
  const stack_t stack = {signal_stack, 0, sizeof signal_stack};
  stack_t stack_before;
  sigaltstack(&stack, &stack_before);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  runner = pthread_self();
  sigaction(SIGSEGV, &action, &before_segv);
  sigaction(SIGBUS, &action, &before_bus);
  bool fine = true;
  if (sigsetjmp(rescue, 1) == 0) {
    for (unsigned i = 0; fine && i < blocks.size(); i++) {
      blockIdx = {blocks[i] % grid_x, blocks[i] / grid_x, 0};
      fine = run_block(threads, shared, random);
    }
  } else {
    fine = false;
    *address = fault_address;
    snprintf(complaint, sizeof complaint, "block (%u, %u), thread %u: no memory at %p", blockIdx.x, blockIdx.y,
             threadIdx.x, *address);
  }
  sigaction(SIGSEGV, &before_segv, nullptr);
  sigaction(SIGBUS, &before_bus, nullptr);
  sigaltstack(&stack_before, nullptr);
  return fine ? nullptr : complaint;
}

// Changes of fibers so far, to measure their speed.
extern "C" uint64_t host_switches() { return host::switches; }
