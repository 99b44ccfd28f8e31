#include "train/parameters.h"

#include <algorithm>
#include <map>

#include "kernels/elementwise.h"

namespace isomer {

namespace {

constexpr std::int64_t kAlignment = 16;  // elements: 64 bytes of float32

bool is_correction_bias(std::string_view name) { return name.ends_with("e_score_correction_bias"); }

/// In the order of the checkpoint, up-projections last: where ranks hold their gradients by heads, the rest is one
/// range.
std::vector<Parameter> parameters_of(const ModelConfig& config) {
  std::vector<Parameter> list;
  // The slots of a model are where seeded weights have tensors.
  initial_model_weights(config, 0, DType::f32, 0, true).for_each([&](const std::string& name, const Tensor& tensor) {
    if (is_correction_bias(name)) return;
    list.push_back({.name = name,
                    .shape = tensor.shape(),
                    .count = tensor.numel(),
                    .decays = tensor.dim() > 1,
                    .is_up_projection = name.ends_with("kv_b_proj.weight")});
  });
  std::stable_partition(list.begin(), list.end(), [](const Parameter& p) { return !p.is_up_projection; });
  std::int64_t offset = 0;
  for (Parameter& parameter : list) {
    parameter.offset = offset;
    offset += (parameter.count + kAlignment - 1) / kAlignment * kAlignment;
  }
  return list;
}

void widen_into(const Tensor& from, const Tensor& to) {
  visit_dtype(from.dtype(), [&]<class From>() {
    const From* source = from.data<From>();
    float* target = to.data<float>();
    for (std::int64_t i = 0; i < from.numel(); ++i) target[i] = static_cast<float>(source[i]);
  });
}

}  // namespace

Parameters::Parameters(RankContext& ctx, const ModelConfig& config, DType dtype)
    : dtype_(dtype), list_(parameters_of(config)) {
  if (dtype == DType::f64) invalid_argument("training in float64: it takes f32 or bf16");
  const std::int64_t elements = list_.back().offset + (list_.back().count + kAlignment - 1) / kAlignment * kAlignment;
  for (const Parameter& parameter : list_) num_trained_ += parameter.count;
  const bool narrow = dtype == DType::bf16;
  master = ctx.zeros("master weights", narrow ? MemoryClass::optimiser : MemoryClass::weight, DType::f32, {elements});
  if (narrow) rounded_ = ctx.zeros("weights", MemoryClass::weight, dtype, {elements});
  gradient = ctx.zeros("gradients", MemoryClass::gradient, DType::f32, {elements});
  first_moment = ctx.zeros("first moments", MemoryClass::optimiser, DType::f32, {elements});
  second_moment = ctx.zeros("second moments", MemoryClass::optimiser, DType::f32, {elements});

  for (std::size_t i = 0; i < list_.size(); ++i) index_[list_[i].name] = i;
  std::map<std::string, Tensor> biases;
  const auto views_of = [&](const Tensor& flat) {
    return make_model_weights(config, [&](const std::string& name, const Shape& shape) {
      if (is_correction_bias(name)) {
        Tensor& bias = biases[name];
        if (!bias) bias = ctx.zeros("router correction bias", MemoryClass::weight, DType::f32, shape);
        return bias;
      }
      const auto found = index_.find(name);
      return found == index_.end() ? Tensor() : view(flat, list_[found->second]);
    });
  };
  master_weights = views_of(master);
  weights = views_of(narrow ? rounded_ : master);
}

const Parameter& Parameters::find(const std::string& name) const {
  const auto found = index_.find(name);
  ISOMER_CHECK(found != index_.end(), "'{}' is no parameter", name);
  return list_[found->second];
}

std::int64_t Parameters::first_up_projection() const {
  const auto found = std::find_if(list_.begin(), list_.end(), [](const Parameter& p) { return p.is_up_projection; });
  return found == list_.end() ? master.numel() : found->offset;
}

Tensor Parameters::view(const Tensor& flat, const Parameter& parameter) const {
  return flat.slice(0, parameter.offset, parameter.count).reshape(parameter.shape);
}

void Parameters::set(const ModelWeights& source) {
  std::map<std::string, Tensor> given;
  source.for_each([&](const std::string& name, const Tensor& tensor) { given[name] = tensor; });
  master_weights.for_each([&](const std::string& name, const Tensor& mine) {
    const auto found = given.find(name);
    if (found == given.end()) throw Error(fmt::format("weights to train from: '{}' is missing", name));
    if (found->second.shape() != mine.shape()) {
      throw Error(fmt::format("weights to train from: '{}' has shape {}: the configuration makes it {}", name,
                              to_string(found->second.shape()), to_string(mine.shape())));
    }
    if (!mine.shape_only()) widen_into(found->second, mine);
  });
}

void Parameters::refresh(RankContext& ctx) {
  if (rounded_)
    copy(ctx, "round weights", master.unflatten(0, {1, master.size(0)}), rounded_.unflatten(0, {1, rounded_.size(0)}));
}

}  // namespace isomer
