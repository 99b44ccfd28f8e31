// A training layout: a sequence-parallel scheme, which Isomer runs, and around it data, tensor, expert and pipeline
// parallelism, ZeRO and recomputation, which are priced and not executed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "sharding/layout.h"

namespace isomer {

/// The executor's three (docs/communication.md), and all: the block and the FFN.
enum class TrainRecompute : std::uint8_t { none, attention, block, all };
std::string_view name_of(TrainRecompute recompute);

struct TrainLayout {
  std::string_view scheme = "explicit";  // of schemes_with_work()
  int sp = 1;                            // ranks on the scheme's first axis
  int groups = 1;                        // on its second, if it has one; a sequence lies on sp·groups
  int tp = 1, pp = 1, dp = 1;            // devices: sp·groups·tp·pp·dp
  int ep = 1;                            // of the sp·groups·dp devices that hold the same stage and columns
  int zero = 0;  // 0, 1: optimiser states cut over sp·groups·dp; 3: gradients and weights as well
  TrainRecompute recompute = TrainRecompute::none;
  int sequence_ranks() const { return sp * groups; }
  int devices() const { return sequence_ranks() * tp * pp * dp; }
  /// Whether anything of it is priced without being what the executor runs (all but scheme, its recomputation, and DP).
  bool priced_not_executed() const {
    return tp > 1 || pp > 1 || ep > 1 || zero > 0 || recompute == TrainRecompute::all;
  }
};

/// The scheme's part, with sizes, as the executor takes it: "laga:8,ring:2,recompute=attention".
Layout sequence_part(const TrainLayout& layout);

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
