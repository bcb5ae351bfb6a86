// Fibers: stacks of their own among which one thread of the operating system changes.

#include <cstdint>
#include <cstring>
#include <sys/mman.h>

#if !defined(__x86_64__) || defined(HOST_UCONTEXT)
#include <ucontext.h>
#endif

namespace host {

constexpr size_t kPage = 4096, kStack = 16 * kPage;

#if defined(__x86_64__) && !defined(HOST_UCONTEXT)
extern "C" void host_switch(void** from, void* to);  // no system call, unlike swapcontext
asm(R"(
.text
.type host_switch, @function
host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size host_switch, . - host_switch
)");
using Place = void*;
inline void change(Place& from, Place& to) { host_switch(&from, to); }
inline void begin_at(Place& place, uint8_t* top, void (*entry)()) {
  void** stack = reinterpret_cast<void**>(top);
  *--stack = nullptr;  // the entry's return address: it never returns, and its frame lies as a call's does
  *--stack = reinterpret_cast<void*>(entry);
  stack -= 6;
  memset(stack, 0, 6 * sizeof(void*));
  place = stack;
}
#else
using Place = ucontext_t;
inline void change(Place& from, Place& to) { swapcontext(&from, &to); }
inline void begin_at(Place& place, uint8_t* top, void (*entry)()) {
  getcontext(&place);
  place.uc_stack.ss_sp = top - kStack / 2;  // what is left of it lies below
  place.uc_stack.ss_size = kStack / 2;
  place.uc_link = nullptr;
  makecontext(&place, entry, 0);
}
#endif

// A stack's end, for each of n fibers. Below each stack is a page that nobody may touch; the ends lie at different
// places of a page, so that they do not share the cache's sets. Null: there is no memory.
inline uint8_t* stack_end(uint8_t* stacks, unsigned i) { return stacks + (i + 1) * (kStack + kPage) - i % 32 * 64; }

inline uint8_t* make_stacks(unsigned n) {
  void* map = mmap(nullptr, n * (kStack + kPage), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return nullptr;
  auto* stacks = static_cast<uint8_t*>(map);
  for (unsigned i = 0; i < n; i++) mprotect(stacks + i * (kStack + kPage), kPage, PROT_NONE);
  return stacks;
}

}  // namespace host
