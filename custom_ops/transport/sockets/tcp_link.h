// Frames over a TCP connection: read into the engine's buffers, written from them.
#ifndef TFSCALE_TRANSPORT_SOCKETS_TCP_LINK_H_
#define TFSCALE_TRANSPORT_SOCKETS_TCP_LINK_H_

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "custom_ops/transport/sockets/link.h"

namespace tfscale {
namespace sockets {

class TcpLink : public Link {
 public:
  // Owns the connected socket, which does not block.
  TcpLink(int socket, int peer, std::string name, std::weak_ptr<Receiver> receiver);
  ~TcpLink() override;

  void Send(const Frame& frame, View bytes, Done written) override;
  void Close() override;
  std::string Name() const override { return name_; }
  int Descriptor() const override { return socket_; }
  void Ready(bool read, bool write) override;

 private:
  struct Outgoing {
    Frame frame;
    View bytes;
    Done written;
    size_t done = 0;  // how much of header and bytes is written
  };

  void Write(std::vector<Done>* written);
  void Read();
  size_t Receive(uint8_t* to, size_t room);
  size_t ReadMessage();
  size_t ReadFrames();
  bool Parse();
  bool Begin(const Frame& frame);
  void End();
  void Lose(const std::string& why);

  const int socket_;
  const int peer_;
  const std::string name_;
  const std::weak_ptr<Receiver> receiver_;

  std::mutex mutex_;  // of what follows
  std::deque<Outgoing> outgoing_;
  bool waits_to_write_ = false;
  bool closed_ = false;

  // Of the progress thread alone.
  std::vector<uint8_t> buffer_;
  size_t begin_ = 0, end_ = 0;  // what is in it and not yet parsed
  std::shared_ptr<Arrival> arrival_;
  size_t wanted_ = 0, got_ = 0;  // bytes of it
};

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_TCP_LINK_H_
