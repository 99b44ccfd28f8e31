// What a conversion learns from text: windows of it, chosen by a seed, through the training forward, with every layer's
// latents and queries summed up in float64 on the way. Nothing of the text stays in memory.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "convert/head_meter.h"
#include "convert/transform.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "train/batches.h"
#include "train/token_file.h"

namespace isomer {

/// Called with what is being done, steps done, and steps in all.
using ConversionProgress = std::function<void(const std::string&, std::int64_t, std::int64_t)>;

struct CalibrationOptions {
  std::int64_t tokens = 65536;        // to calibrate on, at most; rounded down to windows, at least one
  std::int64_t window = 0;            // tokens read at once; 0: 512, or what the model takes
  std::int64_t held_out_windows = 8;  // at most, and at most a tenth of the text, but one
  std::uint64_t seed = 1;             // which windows; hadamard's signs too
};

/// Windows of a text in a seeded order; those held out overlap none of the others.
struct CalibrationWindows {
  std::int64_t window = 0;
  std::vector<Sample> calibration, held_out;
};
/// Throws std::invalid_argument for a text of less than two windows, a window beyond the model's
/// max_position_embeddings, and a tokenizer that is not the model's.
CalibrationWindows calibration_windows(const TokenDataset& text, const ModelConfig& config,
                                       const CalibrationOptions& options);

/// By layer. `weights` are the original model's, in float32. The sums are the same bits whatever `num_threads`.
std::vector<LayerMoments> collect_moments(const ModelConfig& config, const ModelWeights& weights,
                                          std::span<const Sample> samples, int num_threads,
                                          const ConversionProgress& progress);

/// Latent rows c [T, d] become c·U, in place. The same bits whatever `num_threads`.
void rotate_latents(const ModelConfig& config, const std::vector<double>& u, int num_threads, std::vector<double>& c);

/// A layer whose latent is sharded, as HeadMeter takes it.
struct ShardedLayer {
  TplaLayer scalars;
  std::vector<double> kv_b;      // [h(n + v), d], rewritten
  std::vector<double> gamma;     // [d] after the rewrite; empty without a norm
  std::vector<double> rotation;  // U [d, d], where `weights` are not rewritten yet; empty where they are
};
/// HeadSums of every layer over the samples, by the forward of `weights`.
std::vector<HeadSums> measure_shards(const ModelConfig& config, const ModelWeights& weights, const TplaOptions& options,
                                     std::span<const ShardedLayer> layers, std::span<const Sample> samples,
                                     int num_threads, const ConversionProgress& progress);

}  // namespace isomer
