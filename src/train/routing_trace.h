// Which experts the tokens of one step went to, by layer and token of the global batch, so that another run, dry or
// real, under any layout, can take the same way. A trace file is JSON (docs/training.md) and hostile until parsed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "layers/ffn.h"
#include "model/config.h"

namespace isomer {

/// Token s of sequence b of the global batch is number b·seq + s.
class RoutingTrace {
 public:
  /// An empty trace of `sequences` × `seq` tokens for this model.
  RoutingTrace(const ModelConfig& config, std::int64_t sequences, std::int64_t seq);
  /// Throws isomer::Error naming file, key and value; also where the trace is of another model, batch or length.
  static RoutingTrace load(const std::filesystem::path& path, const ModelConfig& config, std::int64_t sequences,
                           std::int64_t seq);
  /// Throws isomer::Error if a token has no experts yet.
  void save(const std::filesystem::path& path) const;

  /// The experts of these tokens, row by row. Several ranks may enter theirs at once.
  void enter(std::int64_t layer, std::span<const std::int64_t> tokens, const Routing& routing);
  /// The routing of these tokens, in their order.
  Routing of(std::int64_t layer, std::span<const std::int64_t> tokens) const;

  RoutingTrace(RoutingTrace&& other) noexcept;

 private:
  std::int64_t sequences_, seq_, top_k_, num_experts_;
  std::map<std::int64_t, std::vector<std::int32_t>> layers_;  // [sequences·seq, top_k]; −1: not entered
  std::mutex mutex_;
};

}  // namespace isomer
