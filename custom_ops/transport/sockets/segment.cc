#include "custom_ops/transport/sockets/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "custom_ops/engine/text.h"

namespace tfscale {
namespace sockets {
namespace {

constexpr size_t kPage = 4096;  // of each: nonce and heads

// Whoever makes a file shorter takes its memory away from all that have mapped it: they would end
// by SIGBUS. Nobody can, once it is sealed.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

static_assert(2 * sizeof(RingHead) + Segment::kNonce <= kPage, "they fit in a page");

Status Failed(const char* what) {
  return Status(Code::kUnavailable, Text(what, ": ", std::strerror(errno)));
}

}  // namespace

size_t Segment::Bytes(size_t ring_bytes) { return kPage + 2 * ring_bytes; }

RingHead* Segment::head(int ring) const {
  return reinterpret_cast<RingHead*>(memory_ + kPage / 2) + ring;
}

uint8_t* Segment::ring(int ring) const { return memory_ + kPage + ring * ring_bytes_; }

std::unique_ptr<Segment> Segment::Map(int file, size_t ring_bytes, Status* status) {
  void* memory =
      mmap(nullptr, Bytes(ring_bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  if (memory == MAP_FAILED) {
    *status = Failed("no shared memory could be mapped");
    close(file);
    return nullptr;
  }
  return std::unique_ptr<Segment>(new Segment(file, static_cast<uint8_t*>(memory), ring_bytes));
}

// Its memory is taken at once: later there would be no way to say that there is none.
std::unique_ptr<Segment> Segment::Make(size_t ring_bytes, const std::string& nonce,
                                       Status* status) {
  const int file = memfd_create("tfscale", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0) {
    *status = Failed("no shared memory could be made");
    return nullptr;
  }
  const auto bytes = static_cast<off_t>(Bytes(ring_bytes));
  if (ftruncate(file, bytes) != 0 || posix_fallocate(file, 0, bytes) != 0) {
    *status = Failed(Text("no ", bytes, " bytes of shared memory").c_str());
    close(file);
    return nullptr;
  }
  if (fcntl(file, F_ADD_SEALS, kSeals) != 0) {
    *status = Failed("shared memory could not be sealed");
    close(file);
    return nullptr;
  }
  auto segment = Map(file, ring_bytes, status);
  if (segment == nullptr) return nullptr;
  std::memcpy(segment->memory_, nonce.data(), kNonce);
  for (int ring : {0, 1}) {
    new (segment->head(ring)) RingHead{};
    segment->head(ring)->reader_sleeps = 1;  // nobody reads yet
  }
  return segment;
}

std::unique_ptr<Segment> Segment::Open(int64_t process, int file, size_t ring_bytes,
                                       const std::string& nonce, Status* status) {
  const std::string path = Text("/proc/", process, "/fd/", file);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (opened < 0) {
    *status = Failed(path.c_str());
    return nullptr;
  }
  // In this order: a size that is sealed stays.
  const int seals = fcntl(opened, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    *status = Status(Code::kUnavailable, path + " is no memory whose size is sealed");
    close(opened);
    return nullptr;
  }
  struct stat about = {};
  if (fstat(opened, &about) != 0 || !S_ISREG(about.st_mode) ||
      about.st_size != static_cast<off_t>(Bytes(ring_bytes))) {
    *status = Status(Code::kUnavailable, path + " is something else here");
    close(opened);
    return nullptr;
  }
  auto segment = Map(opened, ring_bytes, status);
  if (segment == nullptr) return nullptr;
  if (nonce.size() != kNonce || std::memcmp(segment->memory_, nonce.data(), kNonce) != 0) {
    *status = Status(Code::kUnavailable, path + " is something else here");
    return nullptr;
  }
  return segment;
}

void Segment::CloseFile() {
  if (file_ >= 0) close(file_);
  file_ = -1;
}

Segment::~Segment() {
  CloseFile();
  munmap(memory_, Bytes(ring_bytes_));
}

}  // namespace sockets
}  // namespace tfscale
