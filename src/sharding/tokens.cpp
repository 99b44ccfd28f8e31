#include "sharding/tokens.h"

namespace isomer {

namespace {

void append(std::vector<IndexRange>& ranges, IndexRange range) {
  if (range.count == 0) return;
  if (!ranges.empty() && ranges.back().end() == range.begin) {
    ranges.back().count += range.count;
  } else {
    ranges.push_back(range);
  }
}

}  // namespace

std::int64_t TokenShards::group_count(int group) const {
  const std::int64_t parts = 2 * static_cast<std::int64_t>(num_groups);
  return balanced_part(seq, parts, group).count + balanced_part(seq, parts, parts - 1 - group).count;
}

std::vector<IndexRange> TokenShards::group_positions(int group) const {
  const std::int64_t parts = 2 * static_cast<std::int64_t>(num_groups);
  std::vector<IndexRange> ranges;
  append(ranges, balanced_part(seq, parts, group));
  append(ranges, balanced_part(seq, parts, parts - 1 - group));
  return ranges;
}

std::vector<IndexRange> TokenShards::positions(int rank) const {
  const IndexRange mine = tokens_in_group(index_in_group(rank), group_of(rank));
  std::vector<IndexRange> ranges;
  std::int64_t passed = 0;  // tokens of the group before the range
  for (const IndexRange& range : group_positions(group_of(rank))) {
    const std::int64_t begin = std::clamp(mine.begin - passed, std::int64_t{0}, range.count);
    const std::int64_t end = std::clamp(mine.end() - passed, std::int64_t{0}, range.count);
    append(ranges, {range.begin + begin, end - begin});
    passed += range.count;
  }
  return ranges;
}

}  // namespace isomer
