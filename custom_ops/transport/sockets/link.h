// A way for frames between two ranks of different processes.
#ifndef TFSCALE_TRANSPORT_SOCKETS_LINK_H_
#define TFSCALE_TRANSPORT_SOCKETS_LINK_H_

#include <functional>
#include <memory>
#include <string>

#include "custom_ops/engine/transport.h"
#include "custom_ops/transport/sockets/frame.h"

namespace tfscale {
namespace sockets {

// A message on its way in, from its header to its last byte.
struct Arrival {
  View into;             // without an address: wherever the link has the bytes
  bool discard = false;  // nobody waits for it any more
};

// Who gets what a link brings; called by the progress thread alone.
class Receiver {
 public:
  virtual ~Receiver() = default;

  // A frame other than kData or kMore; false if there can be none such.
  virtual bool Told(int from, const Frame& frame) = 0;

  // A message begins; nothing if there can be none such.
  virtual std::shared_ptr<Arrival> Begins(int from, const Frame& frame) = 0;

  // All of it has come: `bytes` are `into`, or where the link has them.
  virtual void Ends(int from, const std::shared_ptr<Arrival>& arrival, View bytes) = 0;

  // Nothing more comes or goes.
  virtual void Lost(int peer, const std::string& why) = 0;
};

// How frames go out to a peer.
class Way {
 public:
  virtual ~Way() = default;

  // From any thread. `bytes` stay owned until they are written; then comes `written`, if any.
  virtual void Send(const Frame& frame, View bytes, Done written) = 0;

  virtual void Close() = 0;

  // "TCP to 10.0.0.3:20001", "shared memory"
  virtual std::string Name() const = 0;
};

// A way that is one connection.
class Link : public Way {
 public:
  // For the progress thread. Descriptor() can be waited for; Ready() says that it is ready to
  // be read or written; Poll() looks where nothing can be waited for, and is true if there was
  // something. Between Sleeps(true) and Sleeps(false) the other side rings.
  virtual int Descriptor() const = 0;
  virtual void Ready(bool read, bool write) = 0;
  virtual bool Poll() { return false; }
  virtual void Sleeps(bool) {}
};

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_LINK_H_
