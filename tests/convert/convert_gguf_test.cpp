// GGUF → safetensors → load gives the bits that loading the GGUF file gives.
#include "convert/convert_gguf.h"

#include <gmock/gmock.h>

#include <cstring>

#include "core/error.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/gguf_bytes.h"
#include "model/inventory.h"
#include "model/model_weights.h"
#include "model/temp_folder.h"
#include "model/tokenizer.h"

namespace isomer {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

const std::string kSource = ISOMER_SOURCE_DIR;
const std::string kSmolLm = kSource + "/models/external/SmolLM2-135M-Instruct.Q4_1.gguf";

std::string golden_path(const std::string& name) { return kSource + "/tests/golden/gguf/" + name + ".gguf"; }

/// The weights of both, by name, are the same bits.
void expect_same_weights(const ModelWeights& expected, const ModelWeights& got) {
  std::map<std::string, Tensor> by_name;
  expected.for_each([&](const std::string& name, const Tensor& tensor) { by_name[name] = tensor; });
  std::size_t seen = 0;
  got.for_each([&](const std::string& name, const Tensor& tensor) {
    ASSERT_TRUE(by_name.contains(name)) << name;
    const Tensor& other = by_name[name];
    ASSERT_EQ(tensor.shape(), other.shape()) << name;
    ASSERT_EQ(tensor.dtype(), other.dtype()) << name;
    EXPECT_EQ(std::memcmp(tensor.raw(), other.raw(), static_cast<std::size_t>(tensor.nbytes())), 0) << name;
    ++seen;
  });
  EXPECT_EQ(seen, by_name.size());
}

void expect_round_trip(const std::string& path, DType dtype, const fs::path& out) {
  convert_gguf({.model = path, .out = out, .dtype = dtype, .max_shard_bytes = 64 << 20});
  const ModelConfig before = load_model_config(path), after = load_model_config(out.string());
  EXPECT_EQ(after.model_type, before.model_type);
  EXPECT_EQ(after.rms_norm_eps, before.rms_norm_eps);
  EXPECT_EQ(after.rope.theta, before.rope.theta);
  const Checkpoint original = Checkpoint::open(path), written = Checkpoint::open(out);
  EXPECT_THAT(take_inventory(written, after).problems, testing::IsEmpty());
  expect_same_weights(load_model_weights(original, before, dtype), load_model_weights(written, after, dtype));
  ASSERT_EQ(Tokenizer::is_at(out), Tokenizer::is_at(path));
  if (Tokenizer::is_at(path)) {
    const Tokenizer one = Tokenizer::load(path), other = Tokenizer::load(out);
    EXPECT_EQ(other.hash(), one.hash());
    EXPECT_EQ(other.eos_id(), one.eos_id());
  }
}

class ConvertGguf : public testing::TestWithParam<std::string> {};

TEST_P(ConvertGguf, RoundTripGivesTheSameBits) {
  const TempFolder folder;
  expect_round_trip(golden_path(GetParam()), DType::f32, folder.path() / "f32");
  expect_round_trip(golden_path(GetParam()), DType::bf16, folder.path() / "bf16");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 2);  // nothing unfinished stays
}
INSTANTIATE_TEST_SUITE_P(Kinds, ConvertGguf, testing::Values("llama", "deepseek2"),
                         [](const auto& param) { return param.param; });

TEST(ConvertGgufModel, SmolLm2RoundTripGivesTheSameBits) {
  if (!fs::exists(kSmolLm)) GTEST_SKIP() << "models/external has no SmolLM2: ./dev fetch-smollm2 gets it";
  const TempFolder folder;
  expect_round_trip(kSmolLm, DType::bf16, folder.path() / "out");
}

TEST(ConvertGgufModel, RefusesWhatItCannotWriteWhole) {
  const TempFolder folder;
  const auto out = folder.path() / "out";
  const auto file = folder.write("x.gguf", tiny_llama().bytes());  // its layers are missing
  try {
    convert_gguf({.model = file, .out = out});
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("missing"));
  }
  EXPECT_FALSE(fs::exists(out));
  EXPECT_THROW(convert_gguf({.model = kSource, .out = out}), std::invalid_argument);
  fs::create_directories(out);
  EXPECT_THROW(convert_gguf({.model = golden_path("llama"), .out = out}), std::invalid_argument);
  EXPECT_TRUE(fs::is_empty(out));
}

}  // namespace
}  // namespace isomer
