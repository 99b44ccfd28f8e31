#include "study/claims_priced_blocks.h"

#include <string_view>

#include "core/error.h"
#include "plan/train_step.h"

namespace isomer {

namespace {

struct PricedBlock {
  double seconds = 0, links = 0;
};

PricedBlock price(const Hardware& hardware, std::string_view scheme, int ranks, std::int64_t seq) {
  const TrainProblem problem{.config = load_model_config("deepseek-v3"), .seq = seq, .batch = 1};
  const TrainLayout layout{.scheme = scheme, .sp = ranks};
  const TrainUnfit unfit = why_unfit(layout, problem.config, seq, problem.batch);
  ISOMER_CHECK(unfit == TrainUnfit::fits, "{} on {} ranks: {}", scheme, ranks, reason_of(unfit));
  const TrainTime time = attention_block_time(problem, hardware, layout);
  return {time.total(), time.sp_links};
}

}  // namespace

EvidenceTable priced_blocks(const std::string& name, const std::vector<int>& ranks,
                            const std::vector<std::int64_t>& seqs) {
  const Hardware hardware = load_hardware(name);
  EvidenceTable table{
      fmt::format("priced: DeepSeek-V3's attention block on {}, bfloat16, fused, forward + backward, ms", name),
      {"P", "S", "explicit", "its links", "shared-rope", "laga", "its links", "latent-gather", "its links",
       "laga on explicit", "on shared-rope", "latent-gather on laga"}};
  for (const int p : ranks) {
    for (const std::int64_t seq : seqs) {
      const PricedBlock full = price(hardware, "explicit", p, seq);
      const PricedBlock shared = price(hardware, "explicit-shared-rope", p, seq);
      const PricedBlock laga = price(hardware, "laga", p, seq);
      const PricedBlock gather = price(hardware, "latent-gather", p, seq);
      const auto ms = [](double seconds) { return Cell(1e3 * seconds, 2); };
      table.rows.push_back({count_cell(p), count_cell(seq), ms(full.seconds), ms(full.links), ms(shared.seconds),
                            ms(laga.seconds), ms(laga.links), ms(gather.seconds), ms(gather.links),
                            Cell(full.seconds / laga.seconds, 2), Cell(shared.seconds / laga.seconds, 2),
                            Cell(laga.seconds / gather.seconds, 2)});
    }
  }
  table.note = fmt::format(
      "{}: {} devices reach each other over {}, more over {}. No description of hardware is the paper's own; prices\n"
      "err as docs/planner.md says, exchanges and arithmetic do not overlap, and no row is part of the verdict.",
      name, hardware.tiers.front().devices, hardware.tiers.front().name, hardware.tiers.back().name);
  return table;
}

}  // namespace isomer
