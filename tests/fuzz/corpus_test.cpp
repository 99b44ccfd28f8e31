// The committed corpus through the fuzzers' own functions: good-* is accepted, bad-* is refused with isomer::Error.
// Names that begin otherwise are the fuzzers' findings: not crashing is all that's asked.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "fuzz/targets.h"

namespace isomer {
namespace {

using Target = bool (*)(const std::uint8_t*, std::size_t);

void run_corpus(const std::string& name, Target target) {
  const std::filesystem::path folder = std::filesystem::path(ISOMER_SOURCE_DIR) / "tests/fuzz/corpus" / name;
  int num_good = 0, num_bad = 0;
  for (const auto& item : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(item.path(), std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(file)), {});
    const auto file_name = item.path().filename().string();
    const bool accepted = target(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
    const bool good = file_name.starts_with("good-"), bad = file_name.starts_with("bad-");
    if (good) {
      EXPECT_TRUE(accepted) << file_name;
    }
    if (bad) {
      EXPECT_FALSE(accepted) << file_name;
    }
    num_good += good;
    num_bad += bad;
  }
  EXPECT_GT(num_good, 3);
  EXPECT_GT(num_bad, 15);
}

TEST(FuzzCorpus, Safetensors) { run_corpus("safetensors", fuzz::safetensors); }
TEST(FuzzCorpus, TokenizerJson) { run_corpus("tokenizer_json", fuzz::tokenizer_json); }
TEST(FuzzCorpus, Gguf) { run_corpus("gguf", fuzz::gguf); }
TEST(FuzzCorpus, TplaSide) { run_corpus("tpla_side", fuzz::tpla_side); }
TEST(FuzzCorpus, Config) { run_corpus("config", fuzz::config); }

}  // namespace
}  // namespace isomer
