// A GGUF file given to subcommands as it is, and the distance of a converted model from one.
#include <gmock/gmock.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "convert/compare_logits.h"
#include "convert/convert_tpla.h"
#include "convert/convert_transmla.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/gguf_bytes.h"
#include "model/text.h"
#include "study/program.h"
#include "tensor_values.h"

namespace isomer {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;
using testing::run_isomer;
using testing::text_of;

const std::string kGguf = std::string(ISOMER_SOURCE_DIR) + "/tests/golden/gguf/";

/// 2 layers, 4 query heads in 2 groups of 8, 24 wide, 48 tokens, float32, no biases, no tokenizer.
GgufBytes grouped_query_model() {
  constexpr std::uint64_t kHidden = 24, kFfn = 20, kQuery = 32, kKey = 16, kVocabulary = 48;
  GgufBytes file;
  file.text("general.architecture", "llama");
  file.integer("llama.block_count", 2);
  file.integer("llama.context_length", 64);
  file.integer("llama.embedding_length", kHidden);
  file.integer("llama.feed_forward_length", kFfn);
  file.integer("llama.attention.head_count", 4);
  file.integer("llama.attention.head_count_kv", 2);
  file.integer("llama.attention.key_length", 8);
  file.integer("llama.attention.value_length", 8);
  file.integer("llama.rope.dimension_count", 8);
  file.decimal("llama.attention.layer_norm_rms_epsilon", 1e-5F);
  std::uint64_t seed = 0;
  const auto add = [&](const std::string& name, const std::vector<std::uint64_t>& sizes, double mean = 0) {
    std::uint64_t count = 1;
    for (const auto size : sizes) count *= size;
    std::vector<float> values;
    for (const double x : testing::noise_values(++seed, static_cast<std::int64_t>(count), 0.3, mean)) {
      values.push_back(static_cast<float>(x));
    }
    file.tensor(name, 0, sizes, GgufBytes::floats(values));
  };
  add("token_embd.weight", {kHidden, kVocabulary});
  add("output_norm.weight", {kHidden}, 1);
  for (int l = 0; l < 2; ++l) {
    const std::string layer = fmt::format("blk.{}.", l);
    add(layer + "attn_norm.weight", {kHidden}, 1);
    add(layer + "ffn_norm.weight", {kHidden}, 1);
    add(layer + "attn_q.weight", {kHidden, kQuery});
    add(layer + "attn_k.weight", {kHidden, kKey});
    add(layer + "attn_v.weight", {kHidden, kKey});
    add(layer + "attn_output.weight", {kQuery, kHidden});
    add(layer + "ffn_gate.weight", {kHidden, kFfn});
    add(layer + "ffn_up.weight", {kHidden, kFfn});
    add(layer + "ffn_down.weight", {kFfn, kHidden});
  }
  return file;
}

class GgufProgram : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_.write("base.gguf", grouped_query_model().bytes());
    folder_.write("text.txt", std::string(default_text()).substr(0, 4000));
    std::string ids;
    for (int i = 0; i < 150; ++i) ids += fmt::format("{} ", (i * 37 + i / 7) % 48);
    folder_.write("ids.txt", ids);
  }
  std::string at(const std::string& name) const { return (folder_.path() / name).string(); }
  json report_of(const std::string& arguments) const {
    const auto result = run_isomer(fmt::format("{} --json {}", arguments, at("report.json")));
    EXPECT_EQ(result.exit_code, 0) << arguments << "\n" << result.err;
    return result.exit_code == 0 ? json::parse(text_of(folder_.path() / "report.json")) : json();
  }
  json divergence(const std::string& model, const std::string& layout, const std::string& more = "") const {
    return report_of(fmt::format("eval kl --base {} --model {} --layout {} --ids {} --window 48 {}", at("base.gguf"),
                                 model, layout, at("ids.txt"), more));
  }
  /// TransMLA of the grouped-query file, at `rank` of the 24 columns that lose nothing beyond the RoPE.
  void convert(const std::string& out, int rank) const {
    const TokenDataset text = TokenDataset::from_tokens({ids()}, 48);
    TransMlaConversion conversion{.model = at("base.gguf"), .out = at(out)};
    conversion.options = {.kv_lora_rank = rank, .qk_rope_head_dim = 8};
    conversion.calibration = {.tokens = 96, .window = 24, .held_out_windows = 2};
    convert_transmla(conversion, text);
  }
  static std::vector<std::int32_t> ids() {
    std::vector<std::int32_t> all;
    for (std::int32_t i = 0; i < 200; ++i) all.push_back((i * 29 + i / 5) % 48);
    return all;
  }
  TempFolder folder_;
};

TEST_F(GgufProgram, DivergenceOfLatentModelsFromAGroupedQueryFile) {
  const json itself = divergence(at("base.gguf"), "tp:2");
  EXPECT_EQ(itself["exact"], true);
  EXPECT_LT(itself["mean_kl"].get<double>(), 1e-9);  // float32 through two layers
  EXPECT_EQ(itself["ids"], at("ids.txt"));
  EXPECT_EQ(itself["tokens_scored"], 149 - 24);  // targets, less what the first window's exact half predicts
  convert("mla", 16);
  convert("narrow", 4);
  const json mla = divergence(at("mla"), "tp:1"), narrow = divergence(at("narrow"), "tp:1");
  EXPECT_GT(mla["mean_kl"].get<double>(), 1e-4);
  EXPECT_GT(narrow["mean_kl"], mla["mean_kl"]);
  EXPECT_EQ(mla["nats_per_token_base"], itself["nats_per_token_base"]);
  TplaConversion cut{.model = at("mla"), .out = at("cut"), .options = {.num_shards = 2}};
  cut.calibration = {.tokens = 96, .window = 24, .held_out_windows = 2};
  convert_tpla(cut, TokenDataset::from_tokens({ids()}, 48));
  const json prefill = divergence(at("cut"), "tpla", "--mode prefill"), decode = divergence(at("cut"), "tpla");
  EXPECT_NEAR(prefill["mean_kl"].get<double>(), mla["mean_kl"].get<double>(), 1e-4);  // the rewrite is the same model
  EXPECT_EQ(decode["exact"], false);
  EXPECT_GT(std::abs(decode["mean_kl"].get<double>() - prefill["mean_kl"].get<double>()), 1e-4);
}

TEST_F(GgufProgram, IdsAndTextExcludeEachOther) {
  const std::string pair = fmt::format("eval kl --base {0} --model {0} --layout tp:1 ", at("base.gguf"));
  folder_.write("bad.txt", "1 2 48");
  for (const auto& [options, part] : std::vector<std::pair<std::string, std::string>>{
           {"", "either --data or --ids"},
           {"--data " + at("text.txt") + " --ids " + at("ids.txt"), "either --data or --ids"},
           {"--ids " + at("bad.txt"), "word 3 is '48', not a token id from 0 to 47"},
           {"--data " + at("text.txt"), "no tokenizer"},
           {"--ids " + at("ids.txt") + " --window 65", "max_position_embeddings 64"}}) {
    const auto result = run_isomer(pair + options);
    EXPECT_EQ(result.exit_code, 2) << options;
    EXPECT_THAT(result.err, HasSubstr(part)) << options;
  }
}

TEST_F(GgufProgram, DecodeLayoutsRunOnTheFilesWeights) {
  const std::string command = "compare --phase decode --context 32 --tokens 2 --layouts tp:2 --cache text --model ";
  const auto result = run_isomer(command + kGguf + "llama.gguf");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("weights " + kGguf + "llama.gguf"));
  EXPECT_THAT(result.out, HasSubstr("within bound"));
  const auto block = run_isomer("compare --seq 32 --ranks 2 --schemes explicit --model " + kGguf + "llama.gguf");
  EXPECT_EQ(block.exit_code, 0) << block.err;
  EXPECT_THAT(block.out, HasSubstr("weights layer 0 of " + kGguf + "llama.gguf"));
}

TEST_F(GgufProgram, TrainTakesConfigurationAndTokenizer) {
  const auto result = run_isomer(fmt::format(
      "train --config {}llama.gguf --data {} --seq 32 --batch 2 --steps 2 --out {}", kGguf, at("text.txt"), at("run")));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("explicit:1"));  // without a latent there is nothing that laga could gather
  const ModelConfig config = load_model_config(at("run"));
  EXPECT_EQ(config.num_key_value_heads, 2);
  EXPECT_EQ(Tokenizer::load(at("run")).hash(), Tokenizer::load(kGguf + "llama.gguf").hash());
  EXPECT_EQ(run_isomer("inspect " + at("run")).exit_code, 0);
}

TEST_F(GgufProgram, TplaOfAFileIsTheSameModel) {
  const std::string file = kGguf + "deepseek2.gguf";
  std::vector<std::int32_t> tokens;
  for (std::int32_t i = 0; i < 200; ++i) tokens.push_back((i * 5 + i / 3) % 8);
  TplaConversion conversion{.model = file, .out = at("cut"), .options = {.num_shards = 2}};
  conversion.calibration = {.tokens = 96, .window = 24, .held_out_windows = 2};
  const TplaConversionResult result = convert_tpla(conversion, TokenDataset::from_tokens({tokens}, 8));
  const ModelConfig config = load_model_config(at("cut"));
  const LogitDifference d = compare_logits(
      config, load_model_weights(Checkpoint::open(file), load_model_config(file), DType::f32),
      load_model_weights(Checkpoint::open(at("cut")), config, DType::f32), result.windows.held_out, 1, {});
  // kv_a and kv_b stand in bfloat16 where the file has them so, and are rounded once more.
  EXPECT_LT(d.largest, 0x1p-7 * d.largest_logit);
  EXPECT_GT(d.largest, 0);
  const auto refused = run_isomer(
      fmt::format("convert tpla --model {}llama.gguf --calibrate {} --out {}", kGguf, at("text.txt"), at("none")));
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("convert it to MLA first"));
}

}  // namespace
}  // namespace isomer
