// L12: LAGA only moves the up-projection; the FLOPs are explicit's.
#include <set>

#include "study/claims_laga.h"

namespace isomer {

namespace {

double flops_of(const RankMeasure& rank, const std::string& op) {
  const auto found = rank.flops_by_op.find(op);
  return found == rank.flops_by_op.end() ? 0 : found->second;
}

/// The additions inside a reduce-scatter are the collective's, not the layer's: counted, and shown apart.
bool is_collective_sum(const std::string& op) { return op.ends_with(" ordered_sum"); }

struct FlopComparison {
  EvidenceTable all;               // every operation
  int num_different = 0;           // operations of the layer that one of them has more of
  double sums_in_collectives = 0;  // LAGA's
  double explicit_forward = 0, explicit_backward = 0, laga_forward = 0, laga_backward = 0;
};

FlopComparison compare_flops(ClaimRuns& runs, AttentionCore core) {
  FlopComparison result;
  const ClaimCase base{.config = claims_v3(), .layout = "explicit", .core = core};
  ClaimCase other = base;
  other.layout = "laga";
  const RankMeasure& a = runs.dry(base).ranks.front();
  const RankMeasure& b = runs.dry(other).ranks.front();
  result.explicit_forward = a.flops_forward;
  result.explicit_backward = a.flops_backward;
  result.laga_forward = b.flops_forward;
  result.laga_backward = b.flops_backward;
  std::set<std::string> ops;
  for (const auto* rank : {&a, &b}) {
    for (const auto& [op, flops] : rank->flops_by_op) ops.insert(op);
  }
  result.all = {fmt::format("operations of one rank, {} attention", name_of(core)),
                {"operation", "explicit, GFLOP", "LAGA, GFLOP", "equal"}};
  for (const std::string& op : ops) {
    const double x = flops_of(a, op), y = flops_of(b, op);
    if (x == 0 && y == 0) continue;
    std::vector<Cell> row = {op, Cell(x / 1e9, 3), Cell(y / 1e9, 3), yes_no(x == y)};
    if (is_collective_sum(op)) {
      result.sums_in_collectives += y;
    } else if (x != y) {
      ++result.num_different;
    }
    result.all.rows.push_back(std::move(row));
  }
  return result;
}

}  // namespace

Claim laga_flops(ClaimRuns& runs) {
  EvidenceTable totals{"V3, SP=8, S = 16384, bf16: counted FLOPs of one rank",
                       {"attention", "phase", "explicit, GFLOP", "LAGA, GFLOP", "equal"}};
  Claim claim{
      .claim = "LAGA does explicit's FLOPs: the up-projection is moved, not repeated",
      .published = "equal",
      .configuration = "fused attention, V3, SP=8, S=16384, bf16; every operation of the layer, forward and backward",
      .command = "isomer claims laga --only L12"};
  Judgement judgement;
  for (AttentionCore core : {AttentionCore::fused, AttentionCore::eager}) {
    FlopComparison c = compare_flops(runs, core);
    totals.rows.push_back({std::string(name_of(core)), "forward", Cell(c.explicit_forward / 1e9, 3),
                           Cell(c.laga_forward / 1e9, 3), yes_no(c.explicit_forward == c.laga_forward)});
    totals.rows.push_back({std::string(name_of(core)), "backward", Cell(c.explicit_backward / 1e9, 3),
                           Cell(c.laga_backward / 1e9, 3), yes_no(c.explicit_backward == c.laga_backward)});
    if (core == AttentionCore::fused) {
      judgement.fixed_agrees = c.num_different == 0;
      claim.found = fmt::format(
          "forward {:.3f} and {:.3f} TFLOP, backward {:.3f} and {:.3f} TFLOP; {} operations of the layer differ",
          c.explicit_forward / 1e12, c.laga_forward / 1e12, c.explicit_backward / 1e12, c.laga_backward / 1e12,
          c.num_different);
      claim.reason = fmt::format(
          "every operation of the layer is compared; the additions inside LAGA's reduce-scatter of the "
          "latent's gradient, {:.3f} GFLOP, are the collective's and stand apart (ordered_sum)",
          c.sums_in_collectives / 1e9);
    }
    claim.evidence.push_back(std::move(c.all));
  }
  claim.evidence.insert(claim.evidence.begin(), std::move(totals));
  claim.verdict = judge(judgement);
  return claim;
}

}  // namespace isomer
