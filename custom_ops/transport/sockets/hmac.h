// Proof that somebody knows a secret, without showing it: HMAC-SHA256 (RFC 2104, FIPS 180-4).
#ifndef TFSCALE_TRANSPORT_SOCKETS_HMAC_H_
#define TFSCALE_TRANSPORT_SOCKETS_HMAC_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace tfscale {
namespace sockets {

using Digest = std::array<uint8_t, 32>;

Digest Sha256(const std::string& bytes);
Digest Hmac(const std::string& secret, const std::string& bytes);

// In a time that does not tell where they differ.
bool Same(const Digest& a, const Digest& b);

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_HMAC_H_
