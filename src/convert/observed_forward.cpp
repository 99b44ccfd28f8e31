#include "convert/observed_forward.h"

#include "comm/group.h"
#include "core/error.h"
#include "train/language_model.h"

namespace isomer {

namespace {

void append(const Tensor& tensor, std::vector<double>& out) {
  if (tensor.dim() > 1 && !tensor.is_contiguous()) {
    for (std::int64_t i = 0; i < tensor.size(0); ++i) append(tensor.select(0, i), out);
    return;
  }
  const std::int64_t step = tensor.is_contiguous() ? 1 : tensor.stride(0);
  visit_dtype(tensor.dtype(), [&]<class T>() {
    const T* data = tensor.data<T>();
    for (std::int64_t i = 0; i < tensor.numel(); ++i) out.push_back(static_cast<double>(data[i * step]));
  });
}

}  // namespace

std::vector<double> widened(const Tensor& tensor) {
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(tensor.numel()));
  if (tensor.numel() > 0) append(tensor, values);
  return values;
}

void observe_forward(const ModelConfig& config, const ModelWeights& weights, std::span<const Sample> samples,
                     int num_threads, const std::function<void(ObservedLayer&&)>& sink) {
  if (config.attention != AttentionKind::mla) {
    invalid_argument("{}: its attention is grouped-query, it has no latent to observe", config.name);
  }
  if (samples.empty()) return;
  run_group({.num_ranks = 1, .threads_per_rank = num_threads}, [&](RankContext& ctx) {
    LanguageModel model(ctx, {.config = config,
                              .layout = parse_layout("explicit:1"),
                              .dtype = DType::f32,
                              .seq = static_cast<std::int64_t>(samples.front().ids.size())});
    ObservedLayer now;
    ctx.set_observer([&](std::string_view name, const Tensor& tensor) {
      if (name == "c") now.c = widened(tensor);
      if (name == "q") now.q = widened(tensor);
      if (name != "latent") return;  // the last of a layer's
      now.k_pe = widened(tensor.slice(1, config.kv_lora_rank, config.qk_rope_head_dim));
      const std::int64_t sample = now.sample, next = now.layer + 1;
      sink(std::move(now));
      now = {.sample = sample, .layer = next};
    });
    for (std::size_t i = 0; i < samples.size(); ++i) {
      ctx.ledger().clear();
      ctx.ops().clear();
      now = {.sample = static_cast<std::int64_t>(i)};
      model.token_losses(ctx, weights, samples.subspan(i, 1));
    }
  });
}

}  // namespace isomer
