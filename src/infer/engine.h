// The inference engine of one rank: sequences in a paged cache, prefill in chunks, decode of a batch of sequences of
// different lengths, one or several new tokens each, under any decode layout. Every method is collective over the
// layout's ranks, which must call it with the same arguments; every rank gets the same logits, to the bit.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "infer/pipeline.h"
#include "parallel/decode/step_scheme.h"

namespace isomer {

struct EngineOptions {
  ModelConfig config;
  DecodeLayout layout;
  std::shared_ptr<const TplaModel> tpla = nullptr;  // of a converted checkpoint, for the layout `tpla`
  std::optional<DType> cache_dtype;  // that of the weights by default; bf16 for float32 weights, or the reverse
  std::int64_t cache_tokens = 0;     // that the cache has room for; a sequence takes whole pages
  std::int64_t page_tokens = 64;     // on one rank
  std::int64_t cache_pages = 0;      // that a rank has; 0: as cache_tokens needs
  std::int64_t prefill_chunk = 512;  // tokens of a prompt that pass through the model at once
};

/// Tokens that `cache_tokens` must be for sequences of these lengths to stand in the cache together. Under data
/// parallelism sequence i is on rank i mod N, and it is the most that one rank has.
std::int64_t cache_tokens_for(std::span<const std::int64_t> lengths, const DecodeLayout& layout,
                              std::int64_t page_tokens);

/// The pages of one rank that these lengths need.
std::int64_t cache_pages_for(std::span<const std::int64_t> lengths, const DecodeLayout& layout,
                             std::int64_t page_tokens);

/// Collective: takes part in the splits that the engines of the other ranks make, and has none itself: a rank of a dry
/// run that is not traced.
void join_engine_splits(Communicator& comm, const EngineOptions& options);

/// Whose logits a prefill gives.
enum class LogitRows : std::uint8_t { last, all };

class Engine {
 public:
  /// `weights`: the whole model's, shared by ranks; activations have their dtype. `comm`: the layout's ranks, which may
  /// be a group of the world; it must outlive the engine. Throws std::invalid_argument for a layout that does not fit
  /// the model or the number of ranks, and for sizes below 1.
  Engine(RankContext& ctx, Communicator& comm, EngineOptions options, const ModelWeights& weights);
  /// All ranks of the world.
  Engine(RankContext& ctx, EngineOptions options, const ModelWeights& weights)
      : Engine(ctx, ctx.comm(), std::move(options), weights) {}

  const EngineOptions& options() const { return options_; }
  /// Of the layout's ranks, this one.
  int rank() const { return comm_.rank(); }
  const KvCache& cache() const { return *cache_; }
  KvCache& cache() { return *cache_; }

  int add_sequence() { return cache_->add_sequence(); }
  void remove_sequence(RankContext& ctx, int sequence) { cache_->remove_sequence(ctx, sequence); }
  /// Forgets what stands from position `length` on (rejected tokens, say).
  void truncate(RankContext& ctx, int sequence, std::int64_t length) { cache_->truncate(ctx, sequence, length); }
  std::int64_t length(int sequence) const { return cache_->length(sequence); }

  /// Appends `ids` to a sequence, prefill_chunk tokens at a time, latent attention in its explicit form, against all
  /// that is cached before. Logits [1 or ids.size(), V], float32 (float64 for float64). Throws std::invalid_argument,
  /// and changes nothing, for no ids, ids outside the vocabulary, a context beyond the model's, a cache too small.
  Tensor prefill(RankContext& ctx, int sequence, std::span<const std::int32_t> ids, LogitRows rows = LogitRows::last);

  struct Input {
    int sequence = 0;
    std::span<const std::int32_t> ids;  // at least one
  };
  /// One step of several sequences, each once; latent attention in its absorbed form. Logits of all new tokens, in the
  /// order of inputs, [Σ ids, V]. Throws as prefill does.
  Tensor decode(RankContext& ctx, std::span<const Input> inputs);

 private:
  void check(std::span<const Input> inputs) const;
  /// Last layer's output [Σ ids, D]; the cache has grown already.
  Tensor forward(RankContext& ctx, std::span<const Input> inputs, std::span<const std::int64_t> begins,
                 bool explicit_form);
  /// Some of the step's sequences through this stage's layers; `x` as the last of them leaves it.
  Tensor through_layers(RankContext& ctx, std::span<const Input> inputs, std::span<const std::int64_t> begins,
                        bool explicit_form);
  /// Data parallelism: own rows [own, D] → those of all ranks, [Σ ids, D], in the order of inputs.
  Tensor of_all_groups(RankContext& ctx, std::span<const Input> inputs, const Tensor& x) const;
  Tensor logits(RankContext& ctx, const Tensor& x) const;

  Communicator& comm_;
  EngineOptions options_;
  std::unique_ptr<Pipeline> pipeline_;
  std::unique_ptr<StepScheme> scheme_;
  DecodeModel model_;
  std::unique_ptr<KvCache> cache_;
};

}  // namespace isomer
