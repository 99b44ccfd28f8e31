#include "model/gguf/weights.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <set>

#include "core/error.h"
#include "model/gguf/dequantise.h"
#include "model/json_text.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxHeads = 1 << 16;
constexpr std::int64_t kMaxExperts = 1 << 16;

struct Rename {
  std::string_view from, to;
};
/// Behind "blk.N." and before ".weight" or ".bias"; behind "model.layers.N.".
constexpr std::array kLayerNames{
    Rename{"attn_norm", "input_layernorm"},
    Rename{"ffn_norm", "post_attention_layernorm"},
    Rename{"attn_q", "self_attn.q_proj"},
    Rename{"attn_k", "self_attn.k_proj"},
    Rename{"attn_v", "self_attn.v_proj"},
    Rename{"attn_output", "self_attn.o_proj"},
    Rename{"attn_q_a", "self_attn.q_a_proj"},
    Rename{"attn_q_a_norm", "self_attn.q_a_layernorm"},
    Rename{"attn_q_b", "self_attn.q_b_proj"},
    Rename{"attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"},
    Rename{"attn_kv_a_norm", "self_attn.kv_a_layernorm"},
    Rename{"attn_kv_b", "self_attn.kv_b_proj"},
    Rename{"ffn_gate", "mlp.gate_proj"},
    Rename{"ffn_up", "mlp.up_proj"},
    Rename{"ffn_down", "mlp.down_proj"},
    Rename{"ffn_gate_inp", "mlp.gate"},
    Rename{"ffn_gate_shexp", "mlp.shared_experts.gate_proj"},
    Rename{"ffn_up_shexp", "mlp.shared_experts.up_proj"},
    Rename{"ffn_down_shexp", "mlp.shared_experts.down_proj"},
};
constexpr std::array kExpertNames{
    Rename{"ffn_gate_exps", "gate_proj"},
    Rename{"ffn_up_exps", "up_proj"},
    Rename{"ffn_down_exps", "down_proj"},
};
constexpr std::array kTopNames{
    Rename{"token_embd.weight", "model.embed_tokens.weight"},
    Rename{"output_norm.weight", "model.norm.weight"},
    Rename{"output.weight", "lm_head.weight"},
};

template <std::size_t N>
std::optional<std::string_view> renamed(const std::array<Rename, N>& names, std::string_view name) {
  for (const auto& [from, to] : names)
    if (from == name) return to;
  return std::nullopt;
}

/// "blk.12.attn_q.weight" in its parts.
struct LayerName {
  std::string layer, part, kind;
};
std::optional<LayerName> layer_name(std::string_view name) {
  constexpr std::string_view kPrefix = "blk.";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  const auto first = name.find('.'), last = name.rfind('.');
  if (first == 0 || first == std::string_view::npos || last == first) return std::nullopt;
  const auto layer = name.substr(0, first);
  if (layer.find_first_not_of("0123456789") != std::string_view::npos) return std::nullopt;
  return LayerName{std::string(layer), std::string(name.substr(first + 1, last - first - 1)),
                   std::string(name.substr(last + 1))};
}

std::optional<FileDType> plain_dtype(GgufType type) {
  switch (type) {
    case GgufType::f32: return FileDType::f32;
    case GgufType::f16: return FileDType::f16;
    case GgufType::bf16: return FileDType::bf16;
    default: return std::nullopt;
  }
}

[[noreturn]] void wrong(const GgufFile& file, const GgufTensor& tensor, std::string_view what) {
  throw Error(fmt::format("{}: at byte {}: tensor '{}' [{}]: {}", file.header().source, tensor.begin,
                          printable(tensor.name), to_string(tensor.shape), what));
}

}  // namespace

GgufWeights::GgufWeights(std::shared_ptr<const GgufFile> file) : file_(std::move(file)) {
  const GgufHeader& header = file_->header();
  const std::string architecture = header.text("general.architecture");
  if (architecture != "llama" && architecture != "deepseek2") {
    header.wrong("general.architecture", fmt::format("\"{}\": expected llama or deepseek2", printable(architecture)));
  }
  num_heads_ = header.integer(architecture + ".attention.head_count", 1, kMaxHeads);
  num_kv_heads_ = header.integer_or(architecture + ".attention.head_count_kv", 1, kMaxHeads, num_heads_);
  add_all(architecture);
  // Sorted by name, sources with them.
  std::vector<std::size_t> order(infos_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return infos_[a].name < infos_[b].name; });
  std::vector<TensorInfo> infos;
  std::vector<Source> sources;
  for (const auto i : order) {
    if (!infos.empty() && infos.back().name == infos_[i].name) {
      wrong(*file_, *sources_[i].tensor, fmt::format("a second tensor for '{}'", printable(infos_[i].name)));
    }
    infos.push_back(std::move(infos_[i]));
    sources.push_back(sources_[i]);
  }
  infos_ = std::move(infos);
  sources_ = std::move(sources);
}

void GgufWeights::add_all(std::string_view architecture) {
  for (const GgufTensor& tensor : file_->header().tensors) {
    if (tensor.name == "rope_freqs.weight") continue;  // goes into the configuration
    if (const auto name = renamed(kTopNames, tensor.name)) {
      add(std::string(*name), tensor.shape, tensor, {});
    } else {
      add_layer_tensor(tensor, architecture);
    }
  }
}

void GgufWeights::add_layer_tensor(const GgufTensor& tensor, std::string_view architecture) {
  const auto parts = layer_name(tensor.name);
  if (!parts) return add(tensor.name, tensor.shape, tensor, {});
  const std::string prefix = fmt::format("model.layers.{}.", parts->layer);
  if (parts->part == "exp_probs_b") return add(prefix + "mlp.gate.e_score_correction_bias", tensor.shape, tensor, {});
  if (parts->part == "attn_k_b") return add_split_kv_b(tensor, prefix + "self_attn.kv_b_proj.weight");
  if (parts->part == "attn_v_b" &&
      file_->header().find(fmt::format("blk.{}.attn_k_b.weight", parts->layer)) != nullptr) {
    return;  // goes with attn_k_b
  }
  if (const auto expert = renamed(kExpertNames, parts->part)) {
    return add_experts(tensor, prefix + "mlp.experts.", fmt::format(".{}.{}", *expert, parts->kind));
  }
  const auto name = renamed(kLayerNames, parts->part);
  if (!name) return add(tensor.name, tensor.shape, tensor, {});
  Source source;
  if (architecture == "llama" && (parts->part == "attn_q" || parts->part == "attn_k")) {
    const auto heads = parts->part == "attn_q" ? num_heads_ : num_kv_heads_;
    const auto rows = tensor.shape[0];
    if (rows % heads != 0 || rows / heads % 2 != 0) {
      wrong(*file_, tensor, fmt::format("its rows don't divide into {} heads of an even size", heads));
    }
    source.pairs_head_dim = rows / heads;
  }
  add(fmt::format("{}{}.{}", prefix, *name, parts->kind), tensor.shape, tensor, source);
}

void GgufWeights::add_experts(const GgufTensor& tensor, const std::string& prefix, const std::string& suffix) {
  if (tensor.shape.size() != 3) wrong(*file_, tensor, "expected three axes: experts, rows, columns");
  if (tensor.shape[0] > kMaxExperts) wrong(*file_, tensor, fmt::format("expected at most {} experts", kMaxExperts));
  const auto rows = tensor.shape[1];
  for (std::int64_t e = 0; e < tensor.shape[0]; ++e) {
    add(fmt::format("{}{}{}", prefix, e, suffix), {rows, tensor.shape[2]}, tensor, {.first_row = e * rows});
  }
}

void GgufWeights::add_split_kv_b(const GgufTensor& keys, const std::string& name) {
  std::string values_name = keys.name;
  values_name.replace(values_name.find("attn_k_b"), 8, "attn_v_b");
  const GgufTensor* values = file_->header().find(values_name);
  if (values == nullptr) wrong(*file_, keys, fmt::format("'{}' is missing beside it", values_name));
  const bool fits = keys.shape.size() == 3 && values->shape.size() == 3 && keys.shape[0] == values->shape[0] &&
                    keys.shape[1] == values->shape[2];
  if (!fits) {
    wrong(*file_, keys,
          fmt::format("expected [heads, kv_lora_rank, n], and '{}' as [heads, v, kv_lora_rank]; it is {}", values_name,
                      to_string(values->shape)));
  }
  std::int64_t rows = 0;
  if (__builtin_mul_overflow(keys.shape[0], keys.shape[2] + values->shape[1], &rows)) wrong(*file_, keys, "too large");
  add(name, {rows, keys.shape[1]}, keys, {.values = values});
}

void GgufWeights::add(std::string name, Shape shape, const GgufTensor& tensor, Source source) {
  TensorInfo info;
  info.name = std::move(name);
  info.dtype = plain_dtype(tensor.type).value_or(FileDType::f32);
  if (!plain_dtype(tensor.type)) info.encoding = block_of(tensor.type).name;
  const auto row_bytes = tensor.width() / block_of(tensor.type).elements * block_of(tensor.type).bytes;
  info.begin = tensor.begin + source.first_row * row_bytes;
  info.bytes = source.values != nullptr ? tensor.bytes + source.values->bytes
               : tensor.shape == shape  ? tensor.bytes
                                        : shape[0] * row_bytes;
  info.shape = std::move(shape);
  source.tensor = &tensor;
  infos_.push_back(std::move(info));
  sources_.push_back(source);
}

void GgufWeights::decode_row(const GgufTensor& tensor, std::int64_t row, float* to) const {
  const GgufBlock block = block_of(tensor.type);
  const auto row_bytes = tensor.width() / block.elements * block.bytes;
  dequantise(tensor.type, file_->file().data() + tensor.begin + row * row_bytes, tensor.width(), to);
}

namespace {

/// Where in the file a row of a head's halves stands, whose rows are in pairs there: (half, i) → 2i + half.
std::int64_t row_in_pairs(std::int64_t row, std::int64_t head_dim) {
  const auto within = row % head_dim, half = head_dim / 2;
  return row - within + 2 * (within % half) + within / half;
}

}  // namespace

void GgufWeights::read_rows(std::size_t index, std::int64_t begin, std::int64_t length, float* to) const {
  const Source& source = sources_[index];
  const GgufTensor& tensor = *source.tensor;
  const auto place = [&](std::int64_t row) {
    return source.first_row + (source.pairs_head_dim > 0 ? row_in_pairs(row, source.pairs_head_dim) : row);
  };
  if (source.values != nullptr) return read_split_kv_b(source, begin, length, to);
  if (tensor.shape.size() == 1) {
    std::vector<float> all(static_cast<std::size_t>(tensor.width()));
    decode_row(tensor, 0, all.data());
    for (std::int64_t i = 0; i < length; ++i) to[i] = all[static_cast<std::size_t>(place(begin + i))];
    return;
  }
  const auto width = infos_[index].shape.size() == 2 ? tensor.width() : num_elements(tensor.shape) / tensor.shape[0];
  const auto file_rows = width / tensor.width();  // of a row here, more than one beyond two axes
  for (std::int64_t i = 0; i < length; ++i) {
    for (std::int64_t j = 0; j < file_rows; ++j) {
      decode_row(tensor, place(begin + i) * file_rows + j, to + i * width + j * tensor.width());
    }
  }
}

/// Per head: n rows that are columns of k_b [d, n], then v rows of v_b [v, d].
void GgufWeights::read_split_kv_b(const Source& source, std::int64_t begin, std::int64_t length, float* to) const {
  const GgufTensor &keys = *source.tensor, &values = *source.values;
  const auto rank = keys.shape[1], n = keys.shape[2], v = values.shape[1];
  std::vector<float> head_keys;  // [d, n] of the head below
  std::int64_t decoded_head = -1;
  for (std::int64_t row = begin; row < begin + length; ++row, to += rank) {
    const auto head = row / (n + v), within = row % (n + v);
    if (within >= n) {
      decode_row(values, head * v + within - n, to);
      continue;
    }
    if (head != decoded_head) {
      head_keys.resize(static_cast<std::size_t>(rank * n));
      for (std::int64_t c = 0; c < rank; ++c) decode_row(keys, head * rank + c, head_keys.data() + c * n);
      decoded_head = head;
    }
    for (std::int64_t c = 0; c < rank; ++c) to[c] = head_keys[static_cast<std::size_t>(c * n + within)];
  }
}

}  // namespace isomer
