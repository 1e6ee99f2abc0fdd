// Several TCP connections to one peer, for networks that give a single one only part of the link:
// large messages take turns, all else goes over the first.
#ifndef TFSCALE_TRANSPORT_SOCKETS_BUNDLE_H_
#define TFSCALE_TRANSPORT_SOCKETS_BUNDLE_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "custom_ops/transport/sockets/link.h"

namespace tfscale {
namespace sockets {

class Bundle : public Way, public std::enable_shared_from_this<Bundle> {
 public:
  Bundle(int peer, std::string name, std::weak_ptr<Receiver> receiver)
      : peer_(peer), name_(std::move(name)), receiver_(std::move(receiver)) {}

  // Before the first message.
  std::shared_ptr<Link> Add(int socket);

  void Send(const Frame& frame, View bytes, Done written) override;
  void Close() override;
  std::string Name() const override { return name_; }

 private:
  // Who gets what one of the connections brings.
  class Strand : public Receiver {
   public:
    explicit Strand(std::weak_ptr<Bundle> bundle) : bundle_(std::move(bundle)) {}
    bool Told(int from, const Frame& frame) override;
    std::shared_ptr<Arrival> Begins(int from, const Frame& frame) override;
    void Ends(int from, const std::shared_ptr<Arrival>& arrival, View bytes) override;
    void Lost(int peer, const std::string& why) override;

   private:
    std::shared_ptr<Receiver> receiver() const;

    const std::weak_ptr<Bundle> bundle_;
    bool awaited_ = false;  // the message that is coming in
  };

  void StrandLost(const std::string& why, bool amid_a_message);

  const int peer_;
  const std::string name_;
  const std::weak_ptr<Receiver> receiver_;
  std::vector<std::shared_ptr<Link>> links_;
  std::vector<std::shared_ptr<Strand>> strands_;
  size_t open_ = 0;  // of the progress thread, once all are added
  std::atomic<size_t> next_{0};
};

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_BUNDLE_H_
