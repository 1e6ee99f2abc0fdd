#include "custom_ops/transport/sockets/hmac.h"

#include <cmath>

namespace tfscale {
namespace sockets {
namespace {

constexpr size_t kBlock = 64;

uint32_t Rotated(uint32_t x, int by) { return x >> by | x << (32 - by); }

// The first 32 bits of the fractional parts of roots of the first primes.
struct Constants {
  uint32_t start[8], round[64];

  Constants() {
    int found = 0;
    for (int n = 2; found < 64; ++n) {
      bool prime = true;
      for (int d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
      if (!prime) continue;
      if (found < 8) start[found] = Fraction(std::sqrt(static_cast<long double>(n)));
      round[found++] = Fraction(std::cbrt(static_cast<long double>(n)));
    }
  }

  static uint32_t Fraction(long double root) {
    return static_cast<uint32_t>((root - std::floor(root)) * 4294967296.0L);
  }
};

const Constants& TheConstants() {
  static const Constants constants;
  return constants;
}

void Mix(const uint8_t* block, uint32_t* state) {
  const Constants& constants = TheConstants();
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = static_cast<uint32_t>(block[4 * i]) << 24 | block[4 * i + 1] << 16 |
           block[4 * i + 2] << 8 | block[4 * i + 3];
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t before = w[i - 15], last = w[i - 2];
    const uint32_t s0 = Rotated(before, 7) ^ Rotated(before, 18) ^ before >> 3;
    const uint32_t s1 = Rotated(last, 17) ^ Rotated(last, 19) ^ last >> 10;
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  uint32_t v[8];
  for (int i = 0; i < 8; ++i) v[i] = state[i];
  for (int i = 0; i < 64; ++i) {
    const uint32_t s1 = Rotated(v[4], 6) ^ Rotated(v[4], 11) ^ Rotated(v[4], 25);
    const uint32_t chosen = (v[4] & v[5]) ^ (~v[4] & v[6]);
    const uint32_t first = v[7] + s1 + chosen + constants.round[i] + w[i];
    const uint32_t s0 = Rotated(v[0], 2) ^ Rotated(v[0], 13) ^ Rotated(v[0], 22);
    const uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
    for (int k = 7; k > 0; --k) v[k] = v[k - 1];
    v[4] += first;
    v[0] = first + s0 + majority;
  }
  for (int i = 0; i < 8; ++i) state[i] += v[i];
}

}  // namespace

Digest Sha256(const std::string& bytes) {
  std::string padded = bytes + '\x80';
  padded.resize((padded.size() + 8 + kBlock - 1) / kBlock * kBlock);
  const uint64_t bits = uint64_t{8} * bytes.size();
  for (int i = 0; i < 8; ++i) padded[padded.size() - 1 - i] = static_cast<char>(bits >> 8 * i);
  uint32_t state[8];
  for (int i = 0; i < 8; ++i) state[i] = TheConstants().start[i];
  for (size_t at = 0; at < padded.size(); at += kBlock) {
    Mix(reinterpret_cast<const uint8_t*>(padded.data()) + at, state);
  }
  Digest digest;
  for (int i = 0; i < 32; ++i) digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - i % 4 * 8));
  return digest;
}

Digest Hmac(const std::string& secret, const std::string& bytes) {
  std::string key = secret;
  if (key.size() > kBlock) {
    const Digest shorter = Sha256(key);
    key.assign(shorter.begin(), shorter.end());
  }
  key.resize(kBlock);
  std::string inner = key, outer = key;
  for (char& c : inner) c = static_cast<char>(c ^ 0x36);
  for (char& c : outer) c = static_cast<char>(c ^ 0x5c);
  const Digest digest = Sha256(inner + bytes);
  return Sha256(outer + std::string(digest.begin(), digest.end()));
}

bool Same(const Digest& a, const Digest& b) {
  int different = 0;
  for (size_t i = 0; i < a.size(); ++i) different |= a[i] ^ b[i];
  return different == 0;
}

}  // namespace sockets
}  // namespace tfscale
