// Frames over a TCP connection: read into the engine's buffers, written from them.
#ifndef TFSCALE_TRANSPORT_SOCKETS_TCP_LINK_H_
#define TFSCALE_TRANSPORT_SOCKETS_TCP_LINK_H_

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "custom_ops/transport/sockets/queued_link.h"

namespace tfscale {
namespace sockets {

class TcpLink : public QueuedLink {
 public:
  TcpLink(int socket, int peer, std::string name, std::weak_ptr<Receiver> receiver);

  std::string Name() const override { return name_; }
  void Ready(bool read, bool write) override;

 private:
  bool Write(std::deque<Outgoing>* queue, std::vector<Done>* written) override;
  void Read();
  size_t Receive(uint8_t* to, size_t room);
  size_t ReadMessage();
  size_t ReadFrames();
  bool Parse();

  const std::string name_;
  bool waits_to_write_ = false;  // under the lock of the queue

  // Of the progress thread alone.
  std::vector<uint8_t> buffer_;
  size_t begin_ = 0, end_ = 0;  // what is in it and not yet parsed
};

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_TCP_LINK_H_
