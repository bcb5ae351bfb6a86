// Streams whose operations are carried out when somebody waits for them, not before, and in the stream's order.

#include <chrono>
#include <deque>
#include <functional>
#include <set>

struct Device {  // and its primary context
  int ordinal = 0, holders = 0;
  Result error = kSuccess;  // of a launch: it stays
};

struct Operation {
  std::string text;
  std::function<Result()> run;
};

struct Stream {
  int number;
  Device* device;
  bool blocking;  // waits for the default stream, and is waited for
  std::deque<Operation> queue;
  unsigned long long done = 0;

  unsigned long long enqueued() const { return done + queue.size(); }

  void enqueue(std::string text, std::function<Result()> run) {
    note("enqueue %d:%d %s", device->ordinal, number, text.c_str());
    queue.push_back({std::move(text), std::move(run)});
  }

  // Carries out what was enqueued before `end`.
  void advance(unsigned long long end) {
    while (done < end && !queue.empty()) {
      const Operation operation = std::move(queue.front());
      queue.pop_front();
      done++;
      if (device->error) continue;  // a card that has failed does nothing more
      note("run %d:%d %s", device->ordinal, number, operation.text.c_str());
      if (const Result result = operation.run()) device->error = result;
    }
  }
  void drain() { advance(enqueued()); }
};

struct Event {
  Device* device;
  bool timed;
  Stream* stream = nullptr;  // that it was last recorded in
  unsigned long long end = 0;
  std::chrono::steady_clock::time_point time{};
};

struct Pool {
  int device;  // or kHost
  unsigned long long threshold = 0;
};

struct Library {
  std::string code;
  std::set<struct Kernel*> kernels;
};

struct Kernel {
  std::string name;
  void* function;  // of a library of kernels
  const char* (*launch)(void*, unsigned, unsigned, unsigned, const uint64_t*, uint64_t, void**);
};
