// The outcome of something that can fail, without a dependency on TensorFlow.
#ifndef TFSCALE_ENGINE_STATUS_H_
#define TFSCALE_ENGINE_STATUS_H_

#include <string>
#include <utility>

namespace tfscale {

enum class Code {
  kOk,
  kInvalidArgument,   // what was asked for makes no sense, or ranks disagree
  kUnavailable,       // a peer is gone
  kDeadlineExceeded,  // a peer is silent
  kCancelled,         // stopped from outside, or because another part failed
  kInternal,
};

class Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

  // Whether all ranks hear of this failure, so that nobody has to be told.
  bool known_to_all() const { return known_to_all_; }
  Status KnownToAll() const {
    Status same = *this;
    same.known_to_all_ = true;
    return same;
  }

 private:
  Code code_ = Code::kOk;
  std::string message_;
  bool known_to_all_ = false;
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_STATUS_H_
