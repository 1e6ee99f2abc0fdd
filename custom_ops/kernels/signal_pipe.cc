// A handler of signals that only writes their numbers into a pipe. Unlike Python's, it may be
// installed by any thread, and unlike a handler in Python, it looks at nothing that the thread
// which it interrupts may be changing.
#include <unistd.h>

#include <cerrno>

namespace {

volatile int pipe_end = -1;

}  // namespace

extern "C" {

// From now on signals are written here.
__attribute__((used, visibility("default"))) void tfscale_signals_go_to(int descriptor) {
  pipe_end = descriptor;
}

__attribute__((used, visibility("default"))) void tfscale_write_signal(int number) {
  const int before = errno;
  const auto byte = static_cast<unsigned char>(number);
  // A pipe that is full has been told enough.
  const auto written = write(pipe_end, &byte, 1);
  static_cast<void>(written);
  errno = before;
}

}  // extern "C"
