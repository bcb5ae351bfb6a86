// A CUDA driver without a GPU: libcuda.so.1 for the tests, in which kernels run on the CPU under launcher.h.
//
// It answers what phasefold's use of cuda-core asks for, and says on stderr when something else is called. Operations
// on streams are carried out as late as the real driver may do it, so that whoever does not wait finds poison.

#include <array>
#include <utility>

#include "driver.h"

#include "devices.h"
#include "copies.h"
#include "launches.h"

namespace {

// A function for each name that is asked for and not here: it says so when it is called.
constexpr size_t kMostUnknown = 1024;
std::array<std::string, kMostUnknown> unknown;
size_t unknown_count = 0;

template <size_t i>
Result not_here() {
  complain(unknown[i] + " is called, which the host card does not have");
  return kNotSupported;
}

template <size_t... i>
constexpr std::array<Result (*)(), kMostUnknown> not_here_table(std::index_sequence<i...>) {
  return {not_here<i>...};
}
constexpr auto kNotHere = not_here_table(std::make_index_sequence<kMostUnknown>());

const std::vector<Call>& calls() {
  static const std::vector<Call> all = [] {
    std::vector<Call> found = devices::calls();
    for (const auto& more : {copies::calls(), launches::calls()}) found.insert(found.end(), more.begin(), more.end());
    return found;
  }();
  return all;
}

enum Search : int { kFound = 0, kNoSuchName = 1, kDriverTooOld = 2 };

}  // namespace

extern "C" Result cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t, int* status) {
  const std::lock_guard lock(state().mutex);
  *found = nullptr;
  if (status) *status = kFound;
  if (version > settings().version) {
    if (status) *status = kDriverTooOld;
    return kNotFound;
  }
  int best = -1;
  for (const Call& call : calls())
    if (!strcmp(call.name, name) && call.version <= version && call.version > best)
      best = call.version, *found = call.function;
  if (!strcmp(name, "cuGetProcAddress")) *found = reinterpret_cast<void*>(&cuGetProcAddress_v2);
  if (*found) return kSuccess;
  if (unknown_count == kMostUnknown) abort();
  unknown[unknown_count] = name;
  *found = reinterpret_cast<void*>(kNotHere[unknown_count++]);
  return kSuccess;
}

// The CUDA runtime looks for this by its symbol, before anything else.
extern "C" Result cuDriverGetVersion(int* version) { return *version = settings().version, kSuccess; }
