// GGUF files: what NumPy reads in tests/golden/gguf is what Isomer reads, and malformed ones are refused by byte.
#include "model/gguf.h"

#include <gmock/gmock.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "golden/golden_file.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/gguf/config.h"
#include "model/gguf/dequantise.h"
#include "model/gguf_bytes.h"
#include "model/inventory.h"
#include "model/model_weights.h"
#include "model/temp_folder.h"
#include "model/tokenizer.h"

namespace isomer {
namespace {

using testing::HasSubstr;

std::string golden_path(const std::string& name) {
  return std::string(ISOMER_SOURCE_DIR) + "/tests/golden/gguf/" + name + ".gguf";
}

std::vector<double> doubles(const Tensor& tensor) {
  std::vector<double> values;
  visit_dtype(tensor.dtype(), [&]<class T>() {
    for (std::int64_t i = 0; i < tensor.numel(); ++i) values.push_back(static_cast<double>(tensor.data<T>()[i]));
  });
  return values;
}

/// fn() throws isomer::Error whose text has all of `parts`.
template <class Fn>
void expect_error(Fn&& fn, const std::vector<std::string>& parts) {
  try {
    fn();
    ADD_FAILURE() << "accepted; expected: " << parts.front();
  } catch (const Error& error) {
    for (const auto& part : parts) EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(Gguf, EveryTypeGivesTheBitsOfNumPy) {
  const GgufFile file(golden_path("types"));
  const auto golden = golden::read_golden_file("gguf/types");
  ASSERT_EQ(file.header().tensors.size(), 8U);
  for (const GgufTensor& tensor : file.header().tensors) {
    ASSERT_EQ(tensor.shape, (Shape{2, 256})) << tensor.name;
    EXPECT_EQ(block_of(tensor.type).name, tensor.name);
    std::vector<float> values(512);
    dequantise(tensor.type, file.file().data() + tensor.begin, 512, values.data());
    const auto& expected = golden.values(tensor.name);
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(static_cast<double>(values[i]), expected[i]) << tensor.name << " at " << i;
    }
  }
}

class GgufModel : public testing::TestWithParam<std::string> {};

TEST_P(GgufModel, HasTheTensorsOfACheckpoint) {
  const Checkpoint checkpoint = Checkpoint::open(golden_path(GetParam()));
  const auto golden = golden::read_golden_file("gguf/" + GetParam());
  const std::vector<std::string_view> listed = checkpoint.names();
  const std::vector<std::string> names(listed.begin(), listed.end());
  std::vector<std::string> expected;
  for (const auto& [name, tensor] : golden.tensors) expected.push_back(name);
  EXPECT_EQ(names, expected);
  for (const auto& [name, tensor] : golden.tensors) {
    ASSERT_EQ(checkpoint.info(name).shape, tensor.shape) << name;
    for (const auto dtype : {DType::f32, DType::f64}) {
      EXPECT_EQ(doubles(checkpoint.read(name, dtype)), tensor.values) << name;
    }
    const Tensor rounded = checkpoint.read(name, DType::bf16);
    for (std::int64_t i = 0; i < rounded.numel(); ++i) {
      const auto value = static_cast<float>(tensor.values[static_cast<std::size_t>(i)]);
      ASSERT_EQ(rounded.data<bf16>()[i].bits, bf16(value).bits) << name;
    }
  }
}

TEST_P(GgufModel, ReadsSlices) {
  const Checkpoint checkpoint = Checkpoint::open(golden_path(GetParam()));
  for (const auto name : checkpoint.names()) {
    const Shape shape = checkpoint.info(name).shape;
    const Tensor whole = checkpoint.read(name, DType::f32);
    const AxisRange rows{shape[0] / 3, shape[0] / 2};
    if (shape.size() == 1) {
      const Tensor part = checkpoint.read(name, DType::f32, {.rows = rows});
      for (std::int64_t i = 0; i < part.numel(); ++i) {
        ASSERT_EQ(part.data<float>()[i], whole.data<float>()[rows.begin + i]) << name;
      }
      continue;
    }
    const AxisRange columns{5, 7};
    const Tensor part = checkpoint.read(name, DType::f32, {rows, columns});
    ASSERT_EQ(part.shape(), (Shape{shape[0] / 2, 7}));
    for (std::int64_t r = 0; r < part.size(0); ++r) {
      for (std::int64_t c = 0; c < 7; ++c) {
        ASSERT_EQ(part.data<float>()[r * 7 + c], whole.data<float>()[(rows.begin + r) * shape[1] + 5 + c]) << name;
      }
    }
    expect_error([&] { checkpoint.read(name, DType::f32, {.rows = {.begin = shape[0] + 1}}); }, {"rows"});
  }
}

TEST_P(GgufModel, IsWhole) {
  const auto path = golden_path(GetParam());
  const ModelConfig config = load_model_config(path);
  const Inventory inventory = take_inventory(Checkpoint::open(path), config);
  EXPECT_THAT(inventory.problems, testing::IsEmpty());
  const ModelWeights weights = load_model_weights(Checkpoint::open(path), config, DType::f32);
  EXPECT_EQ(weights.layers.size(), 2U);
}

INSTANTIATE_TEST_SUITE_P(Kinds, GgufModel, testing::Values("llama", "deepseek2"),
                         [](const auto& param) { return param.param; });

TEST(GgufConfig, OfLlama) {
  const ModelConfig config = load_model_config(golden_path("llama"));
  EXPECT_EQ(config.name, "llama");
  EXPECT_EQ(config.model_type, "llama");
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.num_key_value_heads, 2);
  EXPECT_EQ(config.max_position_embeddings, 128);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);  // not the float32 beside it
  EXPECT_EQ(config.rope.theta, 100000);
  EXPECT_FALSE(config.rope.interleave);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_TRUE(config.attention_bias);
}

TEST(GgufConfig, OfDeepSeek) {
  const ModelConfig config = load_model_config(golden_path("deepseek2"));
  EXPECT_EQ(config.model_type, "deepseek_v3");
  EXPECT_EQ(config.q_lora_rank, 32);
  EXPECT_EQ(config.kv_lora_rank, 32);
  EXPECT_EQ(config.qk_nope_head_dim, 32);
  EXPECT_EQ(config.qk_rope_head_dim, 8);
  EXPECT_EQ(config.v_head_dim, 16);
  EXPECT_TRUE(config.rope.interleave);
  EXPECT_EQ(config.rope.scaling, RopeScalingKind::yarn);
  EXPECT_EQ(config.rope.factor, 40);
  EXPECT_EQ(config.rope.mscale_all_dim, 0.707);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_EQ(config.moe.router, RouterKind::sigmoid_noaux_tc);
  EXPECT_EQ(config.moe.n_routed_experts, 3);
  EXPECT_EQ(config.moe.num_experts_per_tok, 2);
  EXPECT_EQ(config.moe.first_k_dense_replace, 1);
  EXPECT_TRUE(config.moe.norm_topk_prob);
  EXPECT_EQ(config.moe.routed_scaling_factor, 2.5);
}

TEST(GgufConfig, DivisorsOfFrequenciesBecomeLongrope) {
  const TempFolder folder;
  GgufBytes file = tiny_llama();
  file.tensor("rope_freqs.weight", 0, {2}, GgufBytes::floats({1.0F, 8.0F}));
  const ModelConfig config = load_model_config(folder.write("x.gguf", file.bytes()).string());
  EXPECT_EQ(config.rope.scaling, RopeScalingKind::longrope);
  EXPECT_EQ(config.rope.long_factor, (std::vector<double>{1, 8}));
  EXPECT_EQ(config.rope.short_factor, config.rope.long_factor);
  EXPECT_EQ(config.rope.factor, 1);  // no magnitude of its own
}

TEST(GgufConfig, RefusesWhatItDoesNotKnow) {
  const TempFolder folder;
  const auto config_of = [&](const GgufBytes& file) {
    return gguf_config_json(GgufFile(folder.write("x.gguf", file.bytes())));
  };
  EXPECT_THAT(config_of(tiny_llama()), HasSubstr("\"hidden_size\": 8"));
  const auto with = [](const std::string& key, std::uint32_t value) {
    GgufBytes file = tiny_llama();
    file.integer(key, value);
    return file;
  };
  expect_error([&] { config_of(with("llama.expert_count", 8)); }, {"llama.expert_count", "at byte"});
  expect_error([&] { config_of(with("llama.rope.dimension_count", 2)); }, {"rope.dimension_count", "expected 4"});
  expect_error([&] { config_of(with("llama.attention.value_length", 8)); }, {"value_length", "expected 4"});
  expect_error([&] { config_of(with("llama.vocab_size", 7)); }, {"vocab_size", "3 rows"});
  GgufBytes scaled = tiny_llama();
  scaled.text("llama.rope.scaling.type", "dynamic");
  expect_error([&] { config_of(scaled); }, {"rope.scaling.type", "dynamic", "none, linear or yarn"});
  GgufBytes other;
  other.text("general.architecture", "mamba");
  expect_error([&] { config_of(other); }, {"\"mamba\"", "expected llama or deepseek2"});
  expect_error([&] { Checkpoint::open(folder.write("y.gguf", other.bytes())); }, {"expected llama or deepseek2"});
}

TEST(GgufTokenizer, CutsAndMergesAsSmolLm) {
  const Tokenizer tokenizer = Tokenizer::load(golden_path("llama"));
  EXPECT_TRUE(Tokenizer::is_at(golden_path("llama")));
  EXPECT_FALSE(Tokenizer::is_at(golden_path("deepseek2")));
  const auto tokens_of = [&](std::string_view text) {
    std::vector<std::string> tokens;
    for (const auto id : tokenizer.encode(text, true)) tokens.emplace_back(*tokenizer.token_of(id));
    return tokens;
  };
  using Tokens = std::vector<std::string>;
  EXPECT_EQ(tokens_of(" the"), (Tokens{"Ġthe"}));
  EXPECT_EQ(tokens_of("the in"), (Tokens{"t", "he", "Ġ", "in"}));
  EXPECT_EQ(tokens_of("it's"), (Tokens{"i", "t", "'s"}));
  EXPECT_EQ(tokens_of("a12"), (Tokens{"a", "1", "2"}));  // digits stand alone, so that this merge never happens
  EXPECT_EQ(tokens_of("<|im_start|>x<|im_end|>[user]"), (Tokens{"<|im_start|>", "x", "<|im_end|>", "[user]"}));
  EXPECT_EQ(tokens_of("t\4he\4"), (Tokens{"t", "he"}));  // no token for byte 4: passed over
  EXPECT_EQ(tokens_of("\4"), Tokens{});
  EXPECT_EQ(tokenizer.bos_id(), 1);
  EXPECT_EQ(tokenizer.eos_id(), 2);
  EXPECT_TRUE(tokenizer.is_special(0));
  EXPECT_FALSE(tokenizer.is_special(3));
  const std::string text = "the 1st ünï 中\n\t in";
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
}

TEST(Gguf, RefusesMalformedFilesByByte) {
  const auto parse = [](const std::string& bytes) {
    return parse_gguf_header(bytes, static_cast<std::int64_t>(bytes.size()), "f");
  };
  const GgufBytes good = tiny_llama();
  const std::string bytes = good.bytes();
  EXPECT_EQ(parse(bytes).tensors.size(), good.num_tensors());
  // Cut anywhere, it is an error and nothing worse.
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    expect_error([&] { parse(bytes.substr(0, size)); }, {"f: at byte "});
  }
  const auto patched = [&](std::size_t at, std::string_view with) {
    std::string copy = bytes;
    copy.replace(at, with.size(), with);
    return copy;
  };
  expect_error([&] { parse(patched(0, "GGUG")); }, {"at byte 0", "not a GGUF file"});
  expect_error([&] { parse(patched(4, std::string("\0\0\0\3", 4))); }, {"at byte 4", "big-endian"});
  expect_error([&] { parse(patched(4, std::string("\1\0\0\0", 4))); }, {"at byte 4", "version 1"});
  expect_error([&] { parse(patched(8, std::string(8, '\xff'))); }, {"at byte 8", "number of tensors"});
  expect_error([&] { parse(patched(16, std::string(8, '\xff'))); }, {"at byte 16", "number of metadata"});
  expect_error([&] { parse(patched(24, std::string(8, '\xff'))); }, {"at byte 24", "a key of the metadata"});
}

TEST(Gguf, RefusesTablesThatLie) {
  const auto refused = [](const GgufBytes& file, const std::vector<std::string>& parts) {
    const std::string bytes = file.bytes();
    expect_error([&] { parse_gguf_header(bytes, static_cast<std::int64_t>(bytes.size()), "f"); }, parts);
  };
  const auto with = [](const std::string& name, std::uint32_t type, std::vector<std::uint64_t> sizes,
                       std::optional<std::uint64_t> offset = std::nullopt, std::string data = std::string(64, 'x')) {
    GgufBytes file;
    file.tensor("a", 0, {4}, GgufBytes::floats({1, 2, 3, 4}));
    file.tensor(name, type, std::move(sizes), std::move(data), offset);
    return file;
  };
  refused(with("b", 0, {}), {"'b'", "0 sizes, expected 1 to 4"});
  refused(with("b", 0, {1, 1, 1, 1, 1}), {"5 sizes"});
  refused(with("b", 0, {0}), {"size 0 of axis 0"});
  refused(with("b", 0, {1ULL << 62, 4, 2}), {"overflow"});
  refused(with("b", 0, {1ULL << 61, 3}), {"its bytes overflow"});
  refused(with("b", 0, {1ULL << 63}), {"expected less than 2^63"});
  refused(with("b", 6, {32}), {"type 6", "Q8_0 8"});
  refused(with("b", 8, {33}), {"rows of 33 elements", "multiple of 32 for Q8_0"});
  refused(with("b", 0, {4}, 33), {"offset 33", "multiple of 32"});
  refused(with("b", 0, {4}, 1 << 20), {"at offset 1048576", "truncated?"});
  refused(with("b", 0, {64}), {"256 bytes of data at offset 32"});
  refused(with("b", 0, {4}, 0), {"overlap"});
  refused(with("a", 0, {4}), {"'a' stands twice"});
  refused(with("", 0, {4}), {"without a name"});
  GgufBytes twice;
  twice.integer("k", 1);
  twice.integer("k", 2);
  refused(twice, {"'k' stands twice", "at byte 41"});
  GgufBytes alignment;
  alignment.integer("general.alignment", 48);
  refused(alignment, {"general.alignment", "power of two"});
  GgufBytes kind;
  kind.raw("k", 13, "");
  refused(kind, {"has type 13"});
  GgufBytes flag;
  flag.raw("k", 7, "\2");
  refused(flag, {"'k' = 2: expected 0 or 1"});
  GgufBytes array;
  array.raw("k", 9, std::string("\5\0\0\0\0\0\0\0\0\0\0\1", 12));
  refused(array, {"'k' = 72057594037927936", "bytes left"});
  GgufBytes nested;
  nested.raw("k", 9, std::string("\11\0\0\0\0\0\0\0\0\0\0\0", 12));
  refused(nested, {"arrays within arrays"});
}

TEST(Gguf, RefusesTensorsThatDoNotFitTogether) {
  const TempFolder folder;
  const auto open = [&](const GgufBytes& file) { return Checkpoint::open(folder.write("x.gguf", file.bytes())); };
  GgufBytes odd = tiny_llama();
  odd.tensor("blk.7.attn_q.weight", 0, {1, 3}, std::string(12, '\0'));
  expect_error([&] { open(odd); }, {"'blk.7.attn_q.weight'", "2 heads"});
  GgufBytes lone;
  lone.text("general.architecture", "deepseek2");
  lone.integer("deepseek2.attention.head_count", 2);
  lone.tensor("blk.0.attn_k_b.weight", 0, {1, 1, 2}, std::string(8, '\0'));
  expect_error([&] { open(lone); }, {"'blk.0.attn_v_b.weight' is missing"});
  lone.tensor("blk.0.attn_v_b.weight", 0, {2, 1, 2}, std::string(16, '\0'));
  expect_error([&] { open(lone); }, {"expected [heads, kv_lora_rank, n]"});
}

/// A size that no configuration takes is refused where it stands in the file, and what only the configuration as a
/// whole tells, with the file's name.
TEST(Gguf, RefusesConfigurationsWithTheirPlace) {
  const TempFolder folder;
  const auto patched = [&](const std::string& key, std::string_view value) {
    std::ifstream in(golden_path("llama"), std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(in)), {});
    const std::size_t at = bytes.find(key);
    if (at == std::string::npos) throw std::runtime_error("no key " + key);
    bytes.replace(at + key.size() + 4, value.size(), value);  // behind the type
    return folder.write("x.gguf", bytes).string();
  };
  expect_error([&] { load_model_config(patched("llama.feed_forward_length", "\xff\xff\xff\x7f")); },
               {"x.gguf", "at byte", "'llama.feed_forward_length': 2147483647", "16777216"});
  expect_error([&] { load_model_config(patched("llama.attention.head_count_kv", std::string_view("\3\0\0\0", 4))); },
               {"x.gguf: by its metadata: "});
}

}  // namespace
}  // namespace isomer
