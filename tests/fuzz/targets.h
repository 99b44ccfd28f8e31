// What the fuzzers do with one input. Ordinary tests run the committed corpus through the same functions. A malformed
// input ends in isomer::Error; anything else that is thrown, and every crash, is a finding.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "convert/side_file.h"
#include "core/error.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/gguf.h"
#include "model/gguf/config.h"
#include "model/gguf/tokenizer.h"
#include "model/json_text.h"
#include "model/safetensors.h"
#include "model/tokenizer.h"

namespace isomer::fuzz {

/// A file that lives in memory, found under /proc while this object lives.
class MemoryFile {
 public:
  MemoryFile(const void* data, std::size_t size) : descriptor_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    ISOMER_CHECK(descriptor_ >= 0 && ::write(descriptor_, data, size) == static_cast<ssize_t>(size), "{} bytes", size);
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return fmt::format("/proc/self/fd/{}", descriptor_); }

 private:
  int descriptor_;
};

inline void read_everything(const Checkpoint& checkpoint) {
  for (const auto name : checkpoint.names()) {
    for (const auto dtype : {DType::f32, DType::bf16, DType::f64}) {
      try {
        checkpoint.read(name, dtype);
        const Shape& shape = checkpoint.info(name).shape;
        if (shape.size() != 2) continue;
        const AxisRange rows{shape[0] / 2, shape[0] / 3}, columns{shape[1] / 3, shape[1] / 2};
        checkpoint.read(name, dtype, {rows, columns});
      } catch (const Error&) {  // integers, FP8 without scales
      }
    }
  }
}

/// A safetensors file; text that begins with '{' is taken for an index. True if it was accepted.
inline bool safetensors(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    if (bytes.starts_with('{')) {
      parse_weight_map(bytes, "fuzz");
      return true;
    }
    parse_safetensors_header(bytes, static_cast<std::int64_t>(size), "fuzz");
    const MemoryFile file(data, size);
    read_everything(Checkpoint::open(file.path()));
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// fn() may throw isomer::Error.
template <class Fn>
void may_refuse(Fn&& fn) {
  try {
    fn();
  } catch (const Error&) {}
}

/// A GGUF file; its configuration and its tokenizer may be refused by themselves. True if it is a checkpoint.
inline bool gguf(const std::uint8_t* data, std::size_t size) {
  try {
    const std::string_view bytes(reinterpret_cast<const char*>(data), size);
    parse_gguf_header(bytes, static_cast<std::int64_t>(size), "fuzz");
    const MemoryFile memory(data, size);
    const GgufFile file(memory.path());
    may_refuse([&] { parse_model_config(parse_json(gguf_config_json(file), "fuzz"), "fuzz"); });
    may_refuse([&] {
      const TokenizerTexts texts = gguf_tokenizer(file.header());
      Tokenizer::parse(texts.json, "fuzz", texts.config_json).encode("the 12 caf\u00e9 <|im_end|>");
    });
    read_everything(Checkpoint::open(memory.path()));
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// A config.json. True if it was accepted.
inline bool config(const std::uint8_t* data, std::size_t size) {
  try {
    const auto json = parse_json(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
    const ModelConfig parsed = parse_model_config(json, "fuzz");
    const double scale = softmax_scale(parsed);
    ISOMER_CHECK(scale > 0 && scale < 1e9, "softmax scale {}", scale);
    ISOMER_CHECK(num_parameters(parsed) > 0 && num_attention_parameters(parsed) > 0, "no parameters");
    ISOMER_CHECK(cache_elements_per_token(parsed) > 0, "no cache");
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// A tokenizer.json, which then has to encode and decode a text. True if it was accepted.
inline bool tokenizer_json(const std::uint8_t* data, std::size_t size) {
  try {
    const Tokenizer tokenizer = Tokenizer::parse(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
    // A pattern may need more steps than it's given: that is an error too, and says nothing against the file.
    try {
      const auto ids =
          tokenizer.encode("It's 12345 caf\u00e9s,\n\n  \u4e2d\u6587 \U0001fae8<|endoftext|> [A] word", true);
      for (const std::int32_t id : ids) ISOMER_CHECK(tokenizer.token_of(id).has_value(), "no token {}", id);
      tokenizer.decode(ids);
    } catch (const Error&) {}
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// tpla.json, a zero byte, tpla.safetensors, of a small model. True if both were accepted.
inline bool tpla_side(const std::uint8_t* data, std::size_t size) {
  constexpr std::string_view kModel =
      R"({"model_type":"deepseek_v2","vocab_size":8,"hidden_size":8,"intermediate_size":8,"num_hidden_layers":1,
          "num_attention_heads":2,"kv_lora_rank":4,"qk_nope_head_dim":4,"qk_rope_head_dim":2,"v_head_dim":4,
          "q_lora_rank":null,"max_position_embeddings":16,"rms_norm_eps":1e-6})";
  static const ModelConfig model = parse_model_config(parse_json(kModel, "model"), "model");
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const std::size_t end = std::min(bytes.find('\0'), bytes.size());
  try {
    const TplaSideFile side = parse_tpla_json(bytes.substr(0, end), model, "fuzz");
    check_tpla_options(side.options, model);
    const std::string_view scalars = bytes.substr(std::min(end + 1, bytes.size()));
    const MemoryFile file(scalars.data(), scalars.size());
    const std::vector<TplaLayer> layers = read_tpla_scalars(file.path(), model, side.options);
    ISOMER_CHECK(layers.size() == 1 && std::ssize(layers[0].kappa) == 2 * side.options.num_shards, "{} layers",
                 layers.size());
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace isomer::fuzz
