#include "eval/scored_rows.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace isomer {

namespace {

constexpr std::array kModes = {std::pair{ScoreMode::prefill, "prefill"},
                               std::pair{ScoreMode::every_position, "every-position"},
                               std::pair{ScoreMode::decode, "decode"}};

}  // namespace

std::string_view name_of(ScoreMode mode) {
  for (const auto& [value, name] : kModes) {
    if (value == mode) return name;
  }
  return "?";
}

ScoreMode parse_score_mode(std::string_view text) {
  for (const auto& [value, name] : kModes) {
    if (text == name) return value;
  }
  invalid_argument("--mode {}: there are prefill, every-position and decode", text);
}

std::vector<ScoredSequence> scored_sequences(const WindowOrder& windows, std::int64_t j, ScoreMode mode) {
  const Sample sample = windows.sample(j);
  std::vector<ScoredSequence> all;
  for (std::size_t i = 0; i < sample.ids.size(); ++i) {
    if (i == 0 || sample.segments[i] != sample.segments[i - 1]) all.emplace_back();
    ScoredSequence& sequence = all.back();
    const bool is_context = static_cast<std::int64_t>(i) < windows.overlap();
    sequence.ids.push_back(sample.ids[i]);
    sequence.targets.push_back(is_context ? -1 : sample.targets[i]);
    if (mode == ScoreMode::prefill || (mode == ScoreMode::decode && is_context)) ++sequence.exact_rows;
  }
  std::erase_if(all, [](const ScoredSequence& s) {
    return std::all_of(s.targets.begin(), s.targets.end(), [](std::int32_t target) { return target < 0; });
  });
  return all;
}

}  // namespace isomer
