#include "custom_ops/engine/diagnosis.h"

#include <chrono>
#include <cmath>

#include "custom_ops/engine/communicator.h"
#include "custom_ops/engine/notice.h"
#include "custom_ops/engine/text.h"

namespace tfscale {
namespace {

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

double Rounded(double seconds) { return std::round(seconds * 10) / 10; }

}  // namespace

void Diagnosis::ExchangeHellos(const Key& key, Channel* channel, const Heard& heard) const {
  Notice hello;
  hello.kind = Notice::Kind::kHello;
  hello.hash = Hash(request_.signature);
  hello.text = request_.signature;
  View mine = communicator_.pool()->Get(Notice::kBytes);
  hello.Write(mine.data);
  for (int to : communicator_.Others()) {
    channel->Post(to, key, mine, [heard](Status status) {
      if (status.ok()) heard(status);
    });
  }
  for (int peer : progress_.company()) {
    View theirs = communicator_.pool()->Get(Notice::kBytes);
    channel->Receive(peer, key, theirs, [this, peer, theirs, heard](Status status, const View&) {
      Hear(peer, theirs, status, heard);
    });
  }
}

void Diagnosis::Hear(int from, const View& bytes, const Status& status, const Heard& heard) const {
  if (status.code() == Code::kCancelled) return;
  if (!status.ok()) {
    if (!progress_.Needs(from)) return;  // it had done its part, and left
    return heard(communicator_.Gone(request_.name, from, status));
  }
  Notice hello;
  std::string why;
  if (!Notice::Read(bytes.data, bytes.size, Notice::Kind::kHello, &hello, &why)) {
    const std::string who = communicator_.Describe(request_.name, from);
    return heard(Status(Code::kInvalidArgument, who + ": " + why));
  }
  if (hello.hash == Hash(request_.signature)) return heard(Status());
  heard(Status(Code::kInvalidArgument,
               Text("bucket '", request_.name, "': ranks do not agree. ",
                    communicator_.Describe(communicator_.rank()), " runs ", request_.signature,
                    "; ", communicator_.Describe(from), " runs ", hello.text,
                    ". All ranks must run the same operation on the same size, type, wire and "
                    "schedule")));
}

Status Diagnosis::Judge(Clock::time_point now, Clock::time_point last_progress) {
  const Patience& patience = communicator_.patience();
  const double seconds = Seconds(now - last_progress);
  if (patience.slow_after.count() > 0 && now >= last_progress + patience.slow_after) {
    WarnOfLate(now, seconds);
  }
  if (now < last_progress + patience.deadline) return Status();
  // Ranks that wait for a rank that waits leave the first word to whoever sits
  // next to the silent one.
  const bool last_word = now > last_progress + patience.deadline + std::chrono::seconds(1);
  return Blame(now, seconds, last_word);
}

void Diagnosis::Ended(Clock::duration took) const {
  if (!warned_) return;
  communicator_.patience().warn(
      Text("bucket '", request_.name, "' is done after all, after ", Rounded(Seconds(took)), " s"));
}

// Those that wait themselves give signs of life, so only who sits next to a late rank
// says anything.
void Diagnosis::WarnOfLate(Clock::time_point now, double seconds) {
  std::string late;
  for (int peer : Silent(now, Needed())) {
    late += (late.empty() ? "" : ", ") + communicator_.Describe(peer);
  }
  if (late.empty() || warned_.exchange(true)) return;
  communicator_.patience().warn(Text("bucket '", request_.name, "' has waited ", Rounded(seconds),
                                     " s for ", late, ": no sign of life there yet"));
}

// If all that this rank needs wait themselves, the first word is theirs. The last word
// names whoever is silent, needed here or not, and if nobody is, those that are needed.
Status Diagnosis::Blame(Clock::time_point now, double seconds, bool last_word) const {
  const std::vector<int> needed = Needed();
  std::vector<int> blamed = Silent(now, needed);
  if (needed.empty() || (blamed.empty() && !last_word)) return Status();
  if (blamed.empty()) blamed = Silent(now, communicator_.Others());
  if (blamed.empty()) blamed = needed;
  std::string who;
  for (int peer : blamed) {
    who +=
        Text(who.empty() ? "" : ", ", communicator_.Describe(peer), " [", progress_.awaited(peer),
             " messages awaited, ", progress_.untaken(peer), " not taken, ",
             communicator_.IsWaiting(peer, now) ? "itself waiting]" : "no sign of life]");
  }
  return Status(Code::kDeadlineExceeded, Text("bucket '", request_.name, "': no progress for ",
                                              Rounded(seconds), " s, waiting for ", who,
                                              ". A rank without a sign of life is stopped, stuck, "
                                              "or has not reached this collective"));
}

std::vector<int> Diagnosis::Needed() const {
  std::vector<int> needed;
  for (int peer : progress_.company()) {
    if (progress_.Needs(peer)) needed.push_back(peer);
  }
  return needed;
}

std::vector<int> Diagnosis::Silent(Clock::time_point now, const std::vector<int>& among) const {
  std::vector<int> silent;
  for (int peer : among) {
    if (!communicator_.IsWaiting(peer, now)) silent.push_back(peer);
  }
  return silent;
}

}  // namespace tfscale
