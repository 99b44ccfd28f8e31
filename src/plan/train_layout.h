// A training layout: a sequence-parallel scheme, which Isomer runs, and around it data, tensor, expert and pipeline
// parallelism, ZeRO and recomputation, which are priced and not executed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"

namespace isomer {

enum class Recompute : std::uint8_t { none, attention, all };
std::string_view name_of(Recompute recompute);

struct TrainLayout {
  std::string_view scheme = "explicit";  // of schemes_with_work()
  int sp = 1, tp = 1, pp = 1, dp = 1;    // devices: sp·tp·pp·dp
  int ep = 1;                            // of the sp·dp devices that hold the same stage and columns
  int zero = 0;                          // 0, 1: optimiser states cut over sp·dp; 3: gradients and weights as well
  Recompute recompute = Recompute::none;
  int devices() const { return sp * tp * pp * dp; }
  /// Whether anything of it is priced without being what the executor runs (all but scheme, SP and DP).
  bool priced_not_executed() const { return tp > 1 || pp > 1 || ep > 1 || zero > 0 || recompute != Recompute::none; }
};

/// "laga:8,tp:2,pp:4,dp:8,ep=64,zero=1,recompute=attention"; axes of size 1 are left out, the scheme's apart.
std::string to_string(const TrainLayout& layout);

enum class TrainUnfit : std::uint8_t { fits, heads, experts, width, layers, batch, sequence, memory };
inline constexpr int kNumTrainUnfit = 8;
std::string_view reason_of(TrainUnfit unfit);

/// `batch`: sequences a step, of `seq` tokens; memory is not looked at.
TrainUnfit why_unfit(const TrainLayout& layout, const ModelConfig& config, std::int64_t seq, std::int64_t batch);

/// All layouts on exactly `devices`, axes powers of two (times what is left for dp).
std::vector<TrainLayout> enumerate_train_layouts(const ModelConfig& config, int devices,
                                                 const std::vector<std::string_view>& schemes);

}  // namespace isomer
