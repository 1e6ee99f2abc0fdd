// What all links have: a connection, a queue of what is to be written, and the message that is
// coming in.
#ifndef TFSCALE_TRANSPORT_SOCKETS_QUEUED_LINK_H_
#define TFSCALE_TRANSPORT_SOCKETS_QUEUED_LINK_H_

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "custom_ops/transport/sockets/link.h"

namespace tfscale {
namespace sockets {

class QueuedLink : public Link {
 public:
  // Owns the connected socket, which does not block.
  QueuedLink(int socket, int peer, std::weak_ptr<Receiver> receiver)
      : socket_(socket), peer_(peer), receiver_(std::move(receiver)) {}
  ~QueuedLink() override;

  void Send(const Frame& frame, View bytes, Done written) override;
  void Close() override;
  int Descriptor() const override { return socket_; }

 protected:
  struct Outgoing {
    Frame frame;
    View bytes;
    Done written;
    size_t done = 0;  // how much of it is written
  };

  // Takes from the queue, under its lock, as much as can be written now, and gives what is to be
  // called for it. True if anything was written.
  virtual bool Write(std::deque<Outgoing>* queue, std::vector<Done>* written) = 0;

  // Writes what waits, unless another thread does.
  bool Flush();

  bool Tell(const Frame& frame);
  bool Begin(const Frame& frame);
  void FindPlace();  // of the link's own, if the receiver has none
  void End(View bytes);
  void Lose(const std::string& why);

  const int socket_;

  // Of the progress thread alone.
  std::shared_ptr<Arrival> arrival_;
  size_t wanted_ = 0, got_ = 0;  // bytes of it

 private:
  const int peer_;
  const std::weak_ptr<Receiver> receiver_;

  std::mutex mutex_;  // of what follows
  std::deque<Outgoing> outgoing_;
  bool closed_ = false;
};

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_QUEUED_LINK_H_
