// Fuzzes what comes from outside the engine: a notice from a peer, and a
// program from Python.
//
// The first byte picks which. What is accepted must hold what the engine relies
// on: a notice keeps its limits, a program's links form an order.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "custom_ops/engine/notice.h"
#include "custom_ops/engine/program.h"

namespace {

using tfscale::Goal;
using tfscale::Notice;
using tfscale::Program;
using tfscale::Status;

void Require(bool condition) {
  if (!condition) std::abort();
}

void TryNotice(const uint8_t* data, size_t size) {
  std::vector<uint8_t> bytes(Notice::kBytes);
  if (size > 0) std::memcpy(bytes.data(), data, std::min(size, bytes.size()));
  const auto kind = size % 2 == 0 ? Notice::Kind::kHello : Notice::Kind::kFarewell;
  Notice notice;
  std::string why;
  Require(size == Notice::kBytes || !Notice::Read(data, size, kind, &notice, &why));
  if (!Notice::Read(bytes.data(), bytes.size(), kind, &notice, &why)) return Require(!why.empty());
  const bool exit = kind == Notice::Kind::kFarewell && notice.kind == Notice::Kind::kExit;
  Require((notice.kind == kind || exit) && (notice.code == tfscale::Code::kOk) == (size % 2 == 0));
  Require(notice.text.size() < Notice::kBytes);
  std::vector<uint8_t> again(Notice::kBytes);
  notice.Write(again.data());
  Notice same;
  Require(Notice::Read(again.data(), again.size(), kind, &same, &why));
  Require(same.text == notice.text && same.hash == notice.hash && same.code == notice.code);
}

// A link from each move to later ones only, and as many as the later one counts.
void CheckLinks(const Program& program) {
  std::vector<int> waits(program.moves.size(), 0);
  for (size_t s = 0; s < program.moves.size(); ++s) {
    for (int later : program.unlocks[s]) {
      Require(later > static_cast<int>(s) && later < static_cast<int>(waits.size()));
      ++waits[later];
    }
  }
  Require(waits == program.waits_for);
}

// Small numbers are what matters, so a byte is a number; 128 and above, and what is near to it, are
// numbers far out.
int NumberOf(uint8_t byte) {
  const auto wide = static_cast<int8_t>(byte);
  return wide < -8 || wide > 120 ? wide * 16000000 : wide;
}

void TryProgram(const uint8_t* data, size_t size) {
  if (size < 4) return;
  const Goal goal = static_cast<Goal>(data[0] % 5);
  const int ranks = NumberOf(data[1]), rank = NumberOf(data[2]), chunks = NumberOf(data[3]);
  std::vector<int> flat;
  for (size_t i = 4; i < size; ++i) flat.push_back(NumberOf(data[i]));
  Program program;
  const Status status = Program::Parse(flat, goal, rank, ranks, chunks, &program);
  if (!status.ok()) return Require(!status.message().empty());
  Require(program.moves.size() * 4 == flat.size());
  for (const tfscale::Move& move : program.moves) {
    Require(0 <= move.first && move.first < move.last && move.last <= chunks);
    Require(move.kind == tfscale::Kind::kFinalise || (0 <= move.peer && move.peer < ranks));
  }
  for (int peer : program.peers) Require(0 <= peer && peer < ranks && peer != rank);
  CheckLinks(program);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  (data[0] % 2 == 0 ? TryNotice : TryProgram)(data + 1, size - 1);
  return 0;
}
