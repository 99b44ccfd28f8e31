#include "comm/transport.h"

namespace isomer {

namespace {

std::int64_t bytes_without(const std::vector<Block>& blocks, bool pairwise, int rank) {
  std::int64_t sum = 0;
  for (std::size_t peer = 0; peer < blocks.size(); ++peer) {
    if (pairwise || static_cast<int>(peer) != rank) sum += blocks[peer].bytes();
  }
  return sum;
}

}  // namespace

std::int64_t Call::bytes_to_others(int rank) const { return bytes_without(send, pairwise, rank); }
std::int64_t Call::bytes_from_others(int rank) const { return bytes_without(receive, pairwise, rank); }

std::string describe(Collective collective, std::string_view tensor, Phase phase) {
  if (collective == Collective::barrier) return fmt::format("barrier ({})", name_of(phase));
  return fmt::format("{} '{}' ({})", name_of(collective), tensor, name_of(phase));
}

std::string describe(const Call& call) {
  if (call.control) return fmt::format("{} ({})", call.tensor, name_of(call.phase));
  return describe(call.collective, call.tensor, call.phase);
}

std::string describe_with_type(const Call& call) {
  if (call.control || call.collective == Collective::barrier) return describe(call);
  return fmt::format("{} of {}", describe(call), name_of(call.dtype));
}

bool same_call(const Call& a, const Call& b) {
  return a.collective == b.collective && a.control == b.control && a.tensor == b.tensor && a.dtype == b.dtype;
}

Latest later(const Latest& a, const Latest& b) {
  return {std::max(a.ready_s, b.ready_s), std::max(a.ready_wall_s, b.ready_wall_s)};
}

std::string call_error(int world_rank, const Call& call, std::string_view what) {
  return fmt::format("rank {}: {}: {}", world_rank, describe(call), what);
}

}  // namespace isomer
