#include "custom_ops/wire/codec.h"

#include "custom_ops/wire/exact.h"
#include "custom_ops/wire/kernels.h"

namespace tfscale {
namespace wire {
namespace {

constexpr int kLevels = 3;

class BlockCodec final : public Codec {
 public:
  BlockCodec() = default;
  BlockCodec(const Facts& facts, const Kernels* kernels) : facts_(&facts), kernels_(kernels) {}

  std::string_view name() const override { return facts_->name; }
  int64_t element_bytes() const override { return sizeof(float); }
  bool lossless() const override { return false; }

  int64_t Bytes(int64_t n) const override {
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    return blocks * facts_->scale_bytes + (n * facts_->bits + 7) / 8;
  }

  void Encode(const void* x, int64_t n, uint8_t* out, const Rounding& rounding) const override {
    kernels_->encode(static_cast<const float*>(x), n, out, rounding);
  }

  void Decode(const uint8_t* in, int64_t n, void* y) const override {
    kernels_->decode(in, n, nullptr, static_cast<float*>(y));
  }

  void DecodeAdd(const uint8_t* in, int64_t n, const void* base, void* y) const override {
    kernels_->decode_add(in, n, static_cast<const float*>(base), static_cast<float*>(y));
  }

  void DecodeSubtract(const uint8_t* in, int64_t n, const void* x, void* y) const override {
    kernels_->decode_subtract(in, n, static_cast<const float*>(x), static_cast<float*>(y));
  }

 private:
  const Facts* facts_ = nullptr;
  const Kernels* kernels_ = nullptr;
};

const Kernels* KernelsAt(Level level, Format format) {
  if (!Available(level)) return nullptr;
  switch (level) {
    case Level::kBase:
      return BaseKernels(format);
    case Level::kAvx2:
      return Avx2Kernels(format);
    case Level::kAvx512:
      return Avx512Kernels(format);
  }
  return nullptr;
}

struct BlockCodecs {
  BlockCodecs() {
    for (int level = 0; level < kLevels; ++level) {
      for (int i = 0; i < kFormats; ++i) {
        const Kernels* kernels = KernelsAt(static_cast<Level>(level), kFacts[i].format);
        all[level][i] = BlockCodec(kFacts[i], kernels);
      }
    }
  }
  BlockCodec all[kLevels][kFormats];
};

const Codec* FindExact(Element element) {
  static const ExactCodec<float> float32;
  static const ExactCodec<double> float64;
  static const ExactCodec<int32_t> int32;
  static const ExactCodec<int64_t> int64;
  static const ExactCodec<uint8_t> byte;
  switch (element) {
    case Element::kFloat32:
      return &float32;
    case Element::kFloat64:
      return &float64;
    case Element::kInt32:
      return &int32;
    case Element::kInt64:
      return &int64;
    case Element::kByte:
      return &byte;
  }
  return nullptr;
}

}  // namespace

const Codec* FindAt(Level level, Format format, Element element) {
  if (!Available(level)) return nullptr;
  if (format == Format::kFp32) return FindExact(element);
  if (element != Element::kFloat32 || static_cast<int>(format) >= kFormats) return nullptr;
  static const BlockCodecs codecs;
  return &codecs.all[static_cast<int>(level)][static_cast<int>(format)];
}

const Codec* Find(Format format, Element element) { return FindAt(ChosenLevel(), format, element); }

bool ParseFormat(std::string_view name, Format* format) {
  for (const Facts& facts : kFacts) {
    if (facts.name == name) {
      *format = facts.format;
      return true;
    }
  }
  return false;
}

}  // namespace wire
}  // namespace tfscale
