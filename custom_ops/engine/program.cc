#include "custom_ops/engine/program.h"

#include <algorithm>
#include <set>
#include <string>

#include "custom_ops/engine/text.h"

namespace tfscale {
namespace {

enum class Chunk { kPartial, kGiven, kMixed, kFinal };

const char* Name(Kind kind) {
  switch (kind) {
    case Kind::kSend:
      return "send";
    case Kind::kAdd:
      return "add";
    case Kind::kFinalise:
      return "finalise";
    default:
      return "keep";
  }
}

const char* Name(Chunk state) {
  switch (state) {
    case Chunk::kPartial:
      return "a partial sum";
    case Chunk::kGiven:
      return "given away";
    case Chunk::kMixed:
      return "mixed with what others gave";
    default:
      return "final";
  }
}

Status Refuse(const Program& program, size_t move, const std::string& why) {
  return Status(Code::kInvalidArgument,
                Text("the program of rank ", program.rank, " is wrong at move ", move, ": ", why,
                     "; Schedule.verify() says more"));
}

Status CheckShape(const Program& program, size_t at, const Move& move) {
  const bool alone = move.kind == Kind::kFinalise;
  if (alone && move.peer != -1) {
    return Refuse(program, at, Text("finalise has no peer, but -1, got ", move.peer));
  }
  if (!alone && (move.peer < 0 || move.peer >= program.ranks || move.peer == program.rank)) {
    return Refuse(program, at, Text("no peer has rank ", move.peer));
  }
  if (move.first < 0 || move.first >= move.last || move.last > program.chunks) {
    return Refuse(program, at,
                  Text("chunks [", move.first, ", ", move.last, ") are not within the ",
                       program.chunks, " chunks"));
  }
  return Status();
}

// A rank that contributes must give its partial sum away before it may keep a
// final value; in a broadcast or a gather it has nothing to give.
bool Allowed(Goal goal, Kind kind, Chunk state) {
  if (goal == Goal::kMixture) {
    if (kind == Kind::kSend) return state == Chunk::kPartial;
    return kind != Kind::kKeep && state != Chunk::kFinal;
  }
  const bool contributes = goal == Goal::kAllReduce || goal == Goal::kReduceScatter;
  switch (kind) {
    case Kind::kSend:
      return state == Chunk::kFinal || (contributes && state == Chunk::kPartial);
    case Kind::kAdd:
      return contributes && state == Chunk::kPartial;
    case Kind::kFinalise:
      return state == Chunk::kPartial;
    default:
      return contributes ? state == Chunk::kGiven : state == Chunk::kPartial;
  }
}

Chunk After(Goal goal, Kind kind, Chunk state) {
  if (goal == Goal::kMixture && kind == Kind::kSend) return state;
  if (goal == Goal::kMixture && kind == Kind::kAdd) return Chunk::kMixed;
  if (kind == Kind::kFinalise || kind == Kind::kKeep) return Chunk::kFinal;
  if (kind == Kind::kSend && state == Chunk::kPartial) return Chunk::kGiven;
  return state;
}

Status Advance(const Program& program, size_t at, Move* move, std::vector<Chunk>* state) {
  const Chunk before = (*state)[move->first];
  for (int c = move->first; c < move->last; ++c) {
    if ((*state)[c] != before) {
      return Refuse(
          program, at,
          Text("its chunks are partly ", Name(before), " and partly ", Name((*state)[c])));
    }
    if (!Allowed(program.goal, move->kind, before)) {
      return Refuse(program, at,
                    Text("cannot ", Name(move->kind), " chunk ", c, ", which is ", Name(before)));
    }
    (*state)[c] = After(program.goal, move->kind, before);
  }
  move->final = before == Chunk::kFinal || move->kind == Kind::kKeep;
  return Status();
}

Status CheckEnd(const Program& program, const std::vector<Chunk>& state) {
  if (program.goal == Goal::kRoute) return Status();  // most chunks are none of this rank's
  for (int c = 0; c < program.chunks; ++c) {
    const bool given_is_enough = program.goal == Goal::kReduceScatter && state[c] == Chunk::kGiven;
    if (state[c] != Chunk::kFinal && !given_is_enough) {
      return Refuse(program, program.moves.size(), Text("chunk ", c, " ends as ", Name(state[c])));
    }
  }
  return Status();
}

// A move waits for the last earlier move on each of its chunks.
void Link(Program* program) {
  std::vector<int> last_on(program->chunks, -1);
  std::set<int> peers;
  program->unlocks.resize(program->moves.size());
  for (int s = 0; s < static_cast<int>(program->moves.size()); ++s) {
    const Move& move = program->moves[s];
    std::set<int> before(last_on.begin() + move.first, last_on.begin() + move.last);
    before.erase(-1);
    for (int b : before) program->unlocks[b].push_back(s);
    program->waits_for.push_back(static_cast<int>(before.size()));
    std::fill(last_on.begin() + move.first, last_on.begin() + move.last, s);
    if (move.peer >= 0) peers.insert(move.peer);
  }
  program->peers.assign(peers.begin(), peers.end());
}

// Whether each chunk is among `listed`, which may name none twice.
Status Marked(const Program& program, const std::vector<int>& listed, std::vector<bool>* marked) {
  marked->assign(program.chunks, false);
  for (int c : listed) {
    if (c < 0 || c >= program.chunks || (*marked)[c]) {
      return Status(Code::kInvalidArgument,
                    Text("the route of rank ", program.rank, " places chunk ", c,
                         " twice or it is none of the ", program.chunks, " chunks"));
    }
    (*marked)[c] = true;
  }
  return Status();
}

}  // namespace

// What is finalised is read in x, what is kept is written in y, and nothing else has a place: so no
// move reads or writes where there is nothing.
Status Program::Place(const std::vector<int>& in_x, const std::vector<int>& in_y) {
  std::vector<bool> has_x, has_y, read(chunks), kept(chunks);
  Status status = Marked(*this, in_x, &has_x);
  if (status.ok()) status = Marked(*this, in_y, &has_y);
  if (!status.ok()) return status;
  for (const Move& move : moves) {
    std::vector<bool>* of = move.kind == Kind::kFinalise ? &read
                            : move.kind == Kind::kKeep   ? &kept
                                                         : nullptr;
    if (of != nullptr) std::fill(of->begin() + move.first, of->begin() + move.last, true);
  }
  for (int c = 0; c < chunks; ++c) {
    const bool filled = kept[c] ? has_y[c] : !has_y[c] || read[c];
    if (read[c] != has_x[c] || !filled) {
      return Status(Code::kInvalidArgument,
                    Text("the route of rank ", rank, ": chunk ", c, " is ",
                         read[c] ? "finalised" : "not finalised", " and ",
                         kept[c] ? "kept" : "not kept", ", and it lies ", has_x[c] ? "" : "not ",
                         "in x and ", has_y[c] ? "" : "not ", "in y"));
    }
  }
  brings = in_x;
  gets = in_y;
  return Status();
}

Status Program::Parse(const std::vector<int>& flat, Goal goal, int rank, int ranks, int chunks,
                      Program* program) {
  *program = Program();
  program->rank = rank;
  program->ranks = ranks;
  program->chunks = chunks;
  program->goal = goal;
  if (ranks < 1 || rank < 0 || rank >= ranks || chunks < 1 || chunks > kMostChunks ||
      flat.size() % 4 != 0) {
    return Status(Code::kInvalidArgument,
                  Text("expected 0 <= rank < ranks, from 1 to ", kMostChunks,
                       " chunks and four numbers a move, got rank ", rank, ", ranks ", ranks,
                       ", chunks ", chunks, " and ", flat.size(), " numbers"));
  }
  std::vector<Chunk> state(chunks, Chunk::kPartial);
  for (size_t i = 0; i < flat.size(); i += 4) {
    if (flat[i] < 0 || flat[i] > static_cast<int>(Kind::kKeep)) {
      return Refuse(*program, i / 4, Text("no move has kind ", flat[i]));
    }
    Move move{static_cast<Kind>(flat[i]), flat[i + 1], flat[i + 2], flat[i + 3], false};
    Status status = CheckShape(*program, i / 4, move);
    if (status.ok()) status = Advance(*program, i / 4, &move, &state);
    if (!status.ok()) return status;
    program->moves.push_back(move);
  }
  Status status = CheckEnd(*program, state);
  if (!status.ok()) return status;
  Link(program);
  return Status();
}

}  // namespace tfscale
