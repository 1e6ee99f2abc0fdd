// Joins anything printable into a message.
#ifndef TFSCALE_ENGINE_TEXT_H_
#define TFSCALE_ENGINE_TEXT_H_

#include <sstream>
#include <string>

namespace tfscale {

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_TEXT_H_
