// What the driver is told by the environment (hostcard.py has the same names), and its log.

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <unistd.h>

struct Settings {
  static const char* text(const char* name, const char* otherwise) {
    const char* found = getenv(name);
    return found && *found ? found : otherwise;
  }
  static unsigned long long number(const char* name, const char* otherwise) {
    return strtoull(text(name, otherwise), nullptr, 10);
  }
  const std::string kernels = text("HOSTCARD_KERNELS", "");  // libraries of kernels, with ':' between
  const std::string name = text("HOSTCARD_NAME", "host");
  const int devices = (int)number("HOSTCARD_DEVICES", "1");
  const int capability = (int)number("HOSTCARD_CAPABILITY", "90");  // 90 is 9.0
  const int version = (int)number("HOSTCARD_VERSION", "13000");     // of the driver
  const int init = (int)number("HOSTCARD_INIT", "0");               // what cuInit answers
  const unsigned long long memory = number("HOSTCARD_MEMORY", "150754820096");  // bytes of a device
  const unsigned long long pinned = number("HOSTCARD_PINNED", "68719476736");   // bytes that can be pinned
  const unsigned long long fail_at = number("HOSTCARD_FAIL_AT", "0");  // the launch that fails, from 1; 0: none
  const int fail_with = (int)number("HOSTCARD_FAIL_WITH", "719");
  // of blocks and threads: 0 forward, 1 backward, else a seed
  const unsigned long long order = number("HOSTCARD_ORDER", "0");
  const std::string log = text("HOSTCARD_LOG", "");  // a file
};

inline const Settings& settings() {
  static const Settings found;
  return found;
}

// A line in the log, where there is one.
__attribute__((format(printf, 1, 2))) inline void note(const char* format, ...) {
  if (settings().log.empty()) return;
  static const int file = open(settings().log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  char line[1024];
  va_list list;
  va_start(list, format);
  int n = vsnprintf(line, sizeof line - 1, format, list);
  va_end(list);
  n = n < (int)sizeof line - 1 ? n : (int)sizeof line - 2;
  line[n++] = '\n';
  if (write(file, line, n) != n) abort();
}

// What a person should read: on stderr and in the log.
inline void complain(const std::string& text) {
  fprintf(stderr, "host card: %s\n", text.c_str());
  note("complaint: %s", text.c_str());
}
