// Joins anything printable into a message.
#ifndef TFSCALE_ENGINE_TEXT_H_
#define TFSCALE_ENGINE_TEXT_H_

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <string>

namespace tfscale {

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// What a peer has sent, as it may be printed to a terminal.
inline std::string Printable(const char* text, size_t size) {
  std::string printable(text, size);
  std::replace_if(
      printable.begin(), printable.end(),
      [](unsigned char c) { return c != '\n' && (c < 0x20 || c == 0x7f); }, '?');
  return printable;
}

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_TEXT_H_
