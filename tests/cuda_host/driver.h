// What all calls of the driver share: its state, who may call, and the table in which a name finds its function.

#include <algorithm>
#include <dlfcn.h>
#include <memory>
#include <vector>

#include "abi.h"
#include "settings.h"

#include "memory.h"
#include "stream.h"

struct State {
  std::recursive_mutex mutex;
  bool initialized = false;
  std::vector<Device> devices;
  std::vector<std::unique_ptr<Stream>> streams;  // first the devices' default ones; none is deleted
  std::set<Stream*> open;
  std::set<Library*> libraries;
  std::set<Kernel*> kernels;
  std::set<Event*> events;
  std::vector<std::unique_ptr<Pool>> pools;  // the first ones are the devices', then the host's
  Memory memory;
  unsigned long long launches = 0;
};

inline State& state() {
  static State* const made = new State;  // not destroyed: calls come until the process ends
  return *made;
}

inline thread_local Device* current = nullptr;

struct Call {
  const char* name;
  int version;  // of the driver's interface that has this form of it
  void* function;
};

// A call that needs a context, as most do: the thread must have one, and its card must not have failed.
template <auto body, class... Arguments>
Result checked(Arguments... arguments) {
  const std::lock_guard lock(state().mutex);
  if (!state().initialized) return kNotInitialized;
  if (!current) return kInvalidContext;
  if (current->error) return current->error;
  return body(arguments...);
}

// One that does not: queries, and what takes things down.
template <auto body, class... Arguments>
Result plain(Arguments... arguments) {
  const std::lock_guard lock(state().mutex);
  return body(arguments...);
}

template <auto body, class... Arguments>
void* checked_address(Result (*)(Arguments...)) {
  return reinterpret_cast<void*>(&checked<body, Arguments...>);
}
template <auto body, class... Arguments>
void* plain_address(Result (*)(Arguments...)) {
  return reinterpret_cast<void*>(&plain<body, Arguments...>);
}

template <auto body>
Call call(const char* name, int version) {
  return {name, version, checked_address<body>(+body)};
}
template <auto body>
Call open_call(const char* name, int version) {
  return {name, version, plain_address<body>(+body)};
}

// ---- streams

inline Stream* stream_of(Stream* handle) {  // null: there is no such stream
  const auto number = reinterpret_cast<uintptr_t>(handle);
  if (number <= 2) return current ? state().streams[current->ordinal].get() : nullptr;
  return state().open.count(handle) ? handle : nullptr;
}

inline bool is_default(const Stream* stream) { return stream == state().streams[stream->device->ordinal].get(); }

// The default stream and those that are not non-blocking wait for each other.
inline void enqueue(Stream* stream, std::string text, std::function<Result()> run) {
  for (auto& other : state().streams)
    if (other->device == stream->device && other.get() != stream && !other->queue.empty() &&
        (is_default(stream) ? other->blocking : stream->blocking && is_default(other.get())))
      stream->enqueue("wait " + std::to_string(other->number),
                      [waited = other.get(), end = other->enqueued()] { return waited->advance(end), kSuccess; });
  stream->enqueue(std::move(text), std::move(run));
}

inline Result synchronize(Device* device) {
  note("sync %d", device->ordinal);
  auto& streams = state().streams;
  for (size_t i = 0; i < streams.size(); i++) {
    Stream* stream = streams[settings().order == 1 ? streams.size() - 1 - i : i].get();
    if (stream->device == device) stream->drain();
  }
  return device->error;
}
