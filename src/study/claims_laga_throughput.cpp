// L13: LAGA, explicit and latent-gather under links from fast to slow. Judged by docs/data/throughput.json, which
// --record makes anew.
#include <algorithm>
#include <cmath>
#include <map>

#include "study/claims_laga.h"
#include "study/claims_priced_blocks.h"
#include "study/link_study.h"
#include "study/recordings.h"

namespace isomer {

namespace {

// A link is fixed by the multiply-adds that a rank can do while one element crosses it, as on an H100: 990 TFLOP/s in
// bfloat16 over NVLink (450 GB/s each way) and over one 400 Gbit/s port. One core does 117 GFLOP/s in float32.
constexpr double kCoreFlops = 117e9, kElementBytes = 4;
constexpr double kNodeFlopsPerElement = 990e12 / (450e9 / 2), kAcrossFlopsPerElement = 990e12 / (50e9 / 2);
constexpr double kNode = kCoreFlops / kNodeFlopsPerElement * kElementBytes;      // 106 MB/s
constexpr double kAcross = kCoreFlops / kAcrossFlopsPerElement * kElementBytes;  // 11.8 MB/s
constexpr double kFaster = 3 * kNode, kBetween = 3 * kAcross;
const std::vector<std::string> kLayouts = {"explicit", "laga", "latent-gather"};
/// Set before the first run: the model t = compute + bytes / bandwidth accounts for a time that it gives within this.
constexpr double kModelBound = 0.10;

/// V2-Lite's 16 heads, narrower, so that 8192 tokens fit; the latent, in proportion, lies between V3's and V2-Lite's.
ModelConfig block_config(bool quick) {
  ModelConfig config = claims_v2_lite();
  config.hidden_size = quick ? 64 : 512;
  config.qk_nope_head_dim = config.v_head_dim = 32;
  config.qk_rope_head_dim = 8;
  config.kv_lora_rank = 32;
  return config;
}

struct Place {
  int ranks;
  std::int64_t seq;
  AttentionCore core;
  std::vector<double> bandwidths;  // after 0, which warms up
  int repetitions;
};

std::vector<Place> places(bool quick) {
  constexpr auto fused = AttentionCore::fused, eager = AttentionCore::eager;
  if (quick) return {{4, 64, fused, {kAcross, kNode}, 1}, {16, 64, fused, {kAcross, kNode}, 1}};
  const std::vector<double> all = {kAcross, kBetween, kNode, kFaster}, two = {kAcross, kNode};
  std::vector<Place> list;
  for (const int ranks : {2, 4, 8, 16}) {
    list.push_back({ranks, 1024, fused, all, 4});
    list.push_back({ranks, 2048, fused, all, 2});
    list.push_back({ranks, 4096, fused, two, 1});
  }
  list.push_back({16, 8192, fused, two, 1});
  for (const int ranks : {4, 16}) {
    list.push_back({ranks, 1024, eager, two, 2});
    list.push_back({ranks, 2048, eager, two, 1});
  }
  return list;
}

nlohmann::json record_throughput(ClaimRuns& runs) {
  const ModelConfig config = block_config(runs.quick());
  std::map<std::int64_t, BlockData> data;
  auto times = nlohmann::json::array();
  for (const Place& place : places(runs.quick())) {
    if (!data.contains(place.seq)) data.emplace(place.seq, link_data(config, place.seq, runs.seed()));
    for (const std::string& layout : kLayouts) {
      if (place.core == AttentionCore::eager && layout == "latent-gather") continue;
      runs.progress(fmt::format("{} on {} ranks, {} tokens, {}", layout, place.ranks, place.seq, name_of(place.core)));
      LinkCase c{.layout = layout, .ranks = place.ranks, .seq = place.seq, .core = place.core};
      times.push_back(to_json(time_block(config, c, data.at(place.seq), std::max(2, place.repetitions))));
      for (const double bandwidth : place.bandwidths) {
        c.bandwidth = bandwidth;
        times.push_back(to_json(time_block(config, c, data.at(place.seq), place.repetitions)));
      }
    }
  }
  return {{"dimensions",
           {{"hidden", config.hidden_size},
            {"heads", config.num_attention_heads},
            {"d", config.kv_lora_rank},
            {"n", config.qk_nope_head_dim},
            {"r", config.qk_rope_head_dim},
            {"v", config.v_head_dim}}},
          {"times", times}};
}

/// t = compute + bytes / bandwidth, compute as measured without a limit on the link.
double modelled(const std::vector<LinkTime>& times, const LinkTime& t) {
  LinkCase free = t.of;
  free.bandwidth = 0;
  return find_time(times, free).kernel_seconds + t.bytes / t.of.bandwidth;
}

EvidenceTable table_of_times(const std::vector<LinkTime>& times, const nlohmann::json& recorded) {
  EvidenceTable table{"forward + backward, ms; model: compute + bytes / bandwidth",
                      {"P", "S", "attention", "clock", "link, MB/s", "explicit", "model", "laga", "model", "gain",
                       "latent-gather", "model", "gain on LAGA"}};
  for (const LinkTime& e : times) {
    if (e.of.layout != "explicit" || e.of.bandwidth == 0) continue;
    LinkCase c = e.of;
    c.layout = "laga";
    const LinkTime& l = find_time(times, c);
    std::vector<Cell> row = {count_cell(c.ranks),
                             count_cell(c.seq),
                             std::string(name_of(c.core)),
                             e.virtual_clock ? "virtual" : "wall",
                             Cell(c.bandwidth / 1e6, 0),
                             Cell(1e3 * e.seconds, 1),
                             Cell(1e3 * modelled(times, e), 1),
                             Cell(1e3 * l.seconds, 1),
                             Cell(1e3 * modelled(times, l), 1),
                             Cell(e.seconds / l.seconds, 2)};
    if (c.core == AttentionCore::fused) {
      c.layout = "latent-gather";
      const LinkTime& g = find_time(times, c);
      row.emplace_back(1e3 * g.seconds, 1);
      row.emplace_back(1e3 * modelled(times, g), 1);
      row.emplace_back(l.seconds / g.seconds, 2);
    } else {
      row.insert(row.end(), 3, Cell("-"));
    }
    table.rows.push_back(std::move(row));
  }
  table.note = origin_of(recorded);
  return table;
}

/// Where latent-gather and LAGA take equally long, between the two measured links that it lies between; 0: nowhere.
double measured_crossover(const std::vector<LinkTime>& times, int ranks, std::int64_t seq) {
  std::vector<std::pair<double, double>> gains;  // log bandwidth, log(t_laga / t_gather)
  for (const LinkTime& g : times) {
    if (g.of.layout != "latent-gather" || g.of.bandwidth == 0) continue;
    if (!same_place(g, ranks, seq, AttentionCore::fused)) continue;
    LinkCase c = g.of;
    c.layout = "laga";
    gains.emplace_back(std::log(c.bandwidth), std::log(find_time(times, c).seconds / g.seconds));
  }
  std::sort(gains.begin(), gains.end());
  for (std::size_t i = 1; i < gains.size(); ++i) {
    const auto& [x0, y0] = gains[i - 1];
    const auto& [x1, y1] = gains[i];
    if (y0 > 0 && y1 <= 0) return std::exp(x0 + (x1 - x0) * y0 / (y0 - y1));
  }
  return 0;
}

EvidenceTable table_of_crossovers(const std::vector<LinkTime>& times) {
  EvidenceTable table{"the link at which latent-gather and LAGA take equally long",
                      {"P", "S", "bytes less, MB", "arithmetic more, GFLOP", "rate, GFLOP/s", "formula, MB/s",
                       "by measured compute, MB/s", "measured, MB/s"}};
  for (const LinkTime& l : times) {
    if (l.of.layout != "laga" || l.of.bandwidth != 0 || l.of.core != AttentionCore::fused) continue;
    LinkCase c = l.of;
    c.layout = "latent-gather";
    const LinkTime& g = find_time(times, c);
    const double rate = l.flops / l.kernel_seconds, bytes = l.bytes - g.bytes, flops = g.flops - l.flops;
    const auto link = [](double bandwidth) { return bandwidth > 0 ? Cell(bandwidth / 1e6, 0) : Cell("none"); };
    const double measured = measured_crossover(times, c.ranks, c.seq);
    table.rows.push_back({count_cell(c.ranks), count_cell(c.seq), megabytes(bytes, 2), Cell(flops / 1e9, 3),
                          Cell(rate / 1e9, 1), link(crossover_bandwidth(bytes, flops / rate)),
                          link(crossover_bandwidth(bytes, g.kernel_seconds - l.kernel_seconds)),
                          measured > 0 ? link(measured) : Cell("outside the links tried")});
  }
  table.note =
      "formula: (bytes of LAGA − bytes of latent-gather) / (FLOPs that latent-gather does more / LAGA's rate); below "
      "it\n"
      "latent-gather is faster. LAGA and explicit do the same arithmetic and have no such point: LAGA gains wherever\n"
      "bytes count.";
  return table;
}

struct Gains {
  std::vector<double> node, across;  // P=8 and P=16, fused, by S
  std::vector<std::int64_t> seqs;
  double worst_model = 0;        // |measured / modelled − 1|, virtual clock, fused
  bool one_link_agrees = false;  // some link of the sweep gives the published range at P=16
};

double gain_at(const std::vector<LinkTime>& times, int ranks, std::int64_t seq, double bandwidth) {
  LinkCase c{.layout = "explicit", .ranks = ranks, .seq = seq, .bandwidth = bandwidth};
  const double explicit_seconds = find_time(times, c).seconds;
  c.layout = "laga";
  return explicit_seconds / find_time(times, c).seconds;
}

bool within(const std::vector<double>& values, double low, double high) {
  return !values.empty() &&
         std::all_of(values.begin(), values.end(), [&](double v) { return v >= low - 0.005 && v < high + 0.005; });
}

Gains gains_of(const std::vector<LinkTime>& times) {
  Gains gains;
  std::map<double, std::vector<double>> by_link;
  for (const LinkTime& t : times) {
    if (t.of.core != AttentionCore::fused || t.of.bandwidth == 0) continue;
    if (t.virtual_clock) {
      gains.worst_model = std::max(gains.worst_model, std::abs(t.seconds / modelled(times, t) - 1));
    }
    if (t.of.layout != "laga" || (t.of.ranks != 8 && t.of.ranks != 16)) continue;
    const double gain = gain_at(times, t.of.ranks, t.of.seq, t.of.bandwidth);
    if (t.of.ranks == 8 && t.of.bandwidth == kNode) gains.node.push_back(gain);
    if (t.of.ranks == 16) by_link[t.of.bandwidth].push_back(gain);
  }
  gains.across = by_link[kAcross];
  gains.one_link_agrees =
      std::any_of(by_link.begin(), by_link.end(), [](const auto& link) { return within(link.second, 1.07, 1.24); });
  return gains;
}

std::string range_of(const std::vector<double>& values) {
  if (values.empty()) return "-";
  return fmt::format("{:.2f}–{:.2f}×", *std::min_element(values.begin(), values.end()),
                     *std::max_element(values.begin(), values.end()));
}

}  // namespace

Claim laga_throughput(ClaimRuns& runs) {
  Claim claim{
      .claim = "throughput against explicit",
      .published = "fused 1.04–1.06× in a node, 1.07–1.24× across nodes at SP=16; eager 0.73–1.15×",
      .configuration = fmt::format(
          "a narrow block (h 16), float32, links at an H100's FLOPs per element: {:.0f} MB/s a core as in a node, "
          "SP=8, and {:.0f} MB/s as across nodes, SP=16; every S tried, fused",
          kNode / 1e6, kAcross / 1e6),
      .command = "isomer claims laga --only L13 --record docs/data"};
  const nlohmann::json recorded =
      recording(runs.options(), "throughput", claim.command, [&] { return record_throughput(runs); });
  if (recorded.is_null()) return without_recording(std::move(claim));
  const std::vector<LinkTime> times = link_times_from(recorded.at("times"));
  const Gains gains = gains_of(times);
  const bool model_holds = gains.worst_model <= kModelBound;
  claim.found = fmt::format("fused {} as in a node at SP=8, {} as across nodes at SP=16", range_of(gains.node),
                            range_of(gains.across));
  claim.verdict = judge({.fixed_agrees = within(gains.node, 1.04, 1.06) && within(gains.across, 1.07, 1.24),
                         .other_agrees = gains.one_link_agrees,
                         .explanation_holds = model_holds});
  claim.reason = fmt::format(
      "arithmetic is equal, so the gain is (compute + explicit's bytes / bandwidth) / (compute + LAGA's bytes / "
      "bandwidth); measured times differ from it by at most {:.0f} %. {}",
      100 * gains.worst_model,
      gains.one_link_agrees ? "One of the links tried gives the published range at SP=16 for every S"
                            : "None of the links tried gives the published range at SP=16 for every S");
  claim.evidence = {table_of_times(times, recorded), table_of_crossovers(times)};
  for (const char* hardware : {"h100", "a100"}) {
    claim.evidence.push_back(priced_blocks(hardware, {8, 16}, {4096, 8192, 16384, 32768}));
  }
  return claim;
}

}  // namespace isomer
