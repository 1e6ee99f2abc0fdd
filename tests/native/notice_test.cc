// Tests of what ranks tell each other outside the data.
#include "custom_ops/engine/notice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace tfscale {
namespace {

constexpr size_t kHeader = 24;
constexpr size_t kRoom = Notice::kBytes - kHeader;

std::vector<uint8_t> Written(const Notice& notice) {
  std::vector<uint8_t> bytes(Notice::kBytes, 0xab);
  notice.Write(bytes.data());
  return bytes;
}

bool Read(const std::vector<uint8_t>& bytes, Notice* notice, std::string* why) {
  return Notice::Read(bytes.data(), bytes.size(), Notice::Kind::kFarewell, notice, why);
}

Notice Farewell(const std::string& text) {
  Notice notice;
  notice.kind = Notice::Kind::kFarewell;
  notice.code = Code::kUnavailable;
  notice.hash = 0x0123456789abcdef;
  notice.text = text;
  return notice;
}

TEST(Notice, ArrivesAsItWasWritten) {
  for (size_t length : {size_t{0}, size_t{1}, size_t{500}, kRoom}) {
    const Notice sent = Farewell(std::string(length, 'x'));
    Notice read;
    std::string why;
    ASSERT_TRUE(Read(Written(sent), &read, &why)) << why;
    EXPECT_EQ(read.kind, sent.kind);
    EXPECT_EQ(read.code, sent.code);
    EXPECT_EQ(read.hash, sent.hash);
    EXPECT_EQ(read.text, sent.text);
  }
}

TEST(Notice, AnExitMayComeWhereAFarewellIsExpectedAndAHelloMayNot) {
  for (Notice::Kind kind : {Notice::Kind::kExit, Notice::Kind::kHello}) {
    Notice sent = Farewell("its program ended"), read;
    sent.kind = kind;
    std::string why;
    EXPECT_EQ(Read(Written(sent), &read, &why), kind == Notice::Kind::kExit) << why;
    EXPECT_FALSE(
        Notice::Read(Written(sent).data(), Notice::kBytes, Notice::Kind::kHello, &read, &why));
  }
}

TEST(Notice, CutsATextThatIsTooLong) {
  const std::string text = std::string(kRoom, 'a') + std::string(9000, 'b');
  Notice read;
  std::string why;
  ASSERT_TRUE(Read(Written(Farewell(text)), &read, &why)) << why;
  EXPECT_EQ(read.text, std::string(kRoom, 'a'));
}

TEST(Notice, LeavesNothingOfOldMemoryInItsBytes) {
  const std::vector<uint8_t> bytes = Written(Farewell("short"));
  EXPECT_TRUE(
      std::all_of(bytes.begin() + kHeader + 5, bytes.end(), [](uint8_t b) { return b == 0; }));
}

TEST(Notice, IsSafeToPrint) {
  std::string text;
  for (int c = 0; c < 256; ++c) text += static_cast<char>(c);
  Notice read;
  std::string why;
  ASSERT_TRUE(Read(Written(Farewell(text)), &read, &why)) << why;
  ASSERT_EQ(read.text.size(), text.size());
  for (int c = 0; c < 256; ++c) {
    const bool control = (c < 0x20 && c != '\n') || c == 0x7f;
    EXPECT_EQ(read.text[c], control ? '?' : static_cast<char>(c)) << c;
  }
}

TEST(Notice, AnyDamagedByteIsRefusedOrHarmless) {
  const std::vector<uint8_t> whole = Written(Farewell("rank 3 is gone"));
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      std::vector<uint8_t> damaged = whole;
      damaged[at] = static_cast<uint8_t>(value);
      Notice read;
      std::string why;
      if (!Read(damaged, &read, &why)) {
        ASSERT_FALSE(why.empty());
        ASSERT_LT(at, kHeader) << "the text may hold anything";
        continue;
      }
      ASSERT_LE(read.text.size(), kRoom);
      ASSERT_NE(read.code, Code::kOk) << "nobody gives up without a reason";
      ASSERT_LE(static_cast<int>(read.code), static_cast<int>(Code::kInternal));
      ASSERT_TRUE(at >= 8 || damaged == whole) << "magic and protocol must match";
    }
  }
}

TEST(Notice, RefusesAnyOtherSize) {
  std::vector<uint8_t> bytes = Written(Farewell("text"));
  bytes.push_back(0);
  Notice read;
  std::string why;
  for (size_t size : {size_t{0}, size_t{23}, Notice::kBytes - 1, Notice::kBytes + 1}) {
    EXPECT_FALSE(Notice::Read(bytes.data(), size, Notice::Kind::kFarewell, &read, &why));
    EXPECT_NE(why.find("1024"), std::string::npos) << why;
  }
}

TEST(Notice, NamesBothProtocols) {
  std::vector<uint8_t> bytes = Written(Farewell("text"));
  bytes[4] = 99;
  Notice read;
  std::string why;
  EXPECT_FALSE(Read(bytes, &read, &why));
  EXPECT_NE(why.find("protocol 99"), std::string::npos) << why;
  EXPECT_NE(why.find("this one " + std::to_string(kProtocol)), std::string::npos) << why;
}

TEST(Hash, TellsTextsApart) {
  EXPECT_EQ(Hash("fp32 of 100"), Hash("fp32 of 100"));
  EXPECT_NE(Hash("fp32 of 100"), Hash("fp32 of 101"));
  EXPECT_NE(Hash("ab\nc"), Hash("a\nbc"));
  EXPECT_NE(Hash(""), Hash(std::string(1, '\0')));
}

}  // namespace
}  // namespace tfscale
