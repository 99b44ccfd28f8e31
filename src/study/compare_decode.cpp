#include "study/compare_decode.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <future>
#include <limits>
#include <thread>

#include "comm/communicator.h"
#include "core/error.h"
#include "core/quantity_text.h"
#include "study/equal_ranks.h"

namespace isomer {

namespace {

bool is_root(const GroupOptions& group) { return group.backend == Backend::threads || mpi_world().rank == 0; }

/// The same values in float64.
ModelWeights widened_weights(const ModelConfig& config, const ModelWeights& weights) {
  std::map<std::string, Tensor> wide;
  weights.for_each([&](const std::string& name, const Tensor& t) {
    const Tensor copy = Tensor::unrecorded(name, DType::f64, t.shape());
    visit_dtype(t.dtype(), [&]<class T>() {
      std::transform(t.data<T>(), t.data<T>() + t.numel(), copy.data<double>(),
                     [](T x) { return static_cast<double>(x); });
    });
    wide[name] = copy;
  });
  return make_model_weights(config, [&](const std::string& name, const Shape&) {
    const auto found = wide.find(name);
    return found == wide.end() ? Tensor() : found->second;
  });
}

DecodeTokens first_tokens(const DecodeWorkload& w) {
  DecodeTokens tokens(1);
  for (std::int64_t b = 0; b < w.batch; ++b) {
    tokens[0].push_back(static_cast<std::int32_t>((17 + 31 * b) % w.config.vocab_size));
  }
  return tokens;
}

DecodeRun one_rank(const DecodeWorkload& w, const ModelWeights& weights, const DecodeTokens& read, bool explicit_form,
                   std::atomic<std::uint64_t>* heartbeat) {
  DecodeRunOptions run{.layout = parse_decode_layout("tp:1", w.config), .read = read, .explicit_form = explicit_form};
  run.group.heartbeat = heartbeat;
  return run_decode(w, weights, run);
}

double max_difference(const DecodeRun& a, const DecodeRun& b) {
  double largest = 0;
  for (std::size_t step = 0; step < a.logits.size(); ++step) {
    for (std::size_t i = 0; i < a.logits[step].size(); ++i) {
      const double difference = std::abs(a.logits[step][i] - b.logits[step][i]);
      if (std::isnan(difference)) return std::numeric_limits<double>::infinity();
      largest = std::max(largest, difference);
    }
  }
  return largest;
}

/// What all layouts are held against.
struct Expected {
  DecodeRun reference;  // float64, one rank, absorbed as it is
  DecodeTokens read;    // tokens that each step reads: greedy ones of the reference
  double bound = 0, max_reference = 0;
};

/// `heartbeat` of the rank that computes it, null where no other waits.
Expected expected_of(const DecodeCompareOptions& o, const ModelWeights& weights, std::atomic<std::uint64_t>* heartbeat,
                     const std::function<void(const std::string&)>& progress) {
  progress("one rank in float64");
  DecodeWorkload wide = o.workload;
  wide.dtype = DType::f64;
  Expected expected;
  expected.reference = one_rank(wide, widened_weights(wide.config, weights), first_tokens(wide), false, heartbeat);
  expected.read = first_tokens(wide);
  const DecodeTokens& chosen = expected.reference.chosen;
  expected.read.insert(expected.read.end(), chosen.begin(), chosen.end() - 1);
  for (const auto& step : expected.reference.logits) {
    for (const double x : step) expected.max_reference = std::max(expected.max_reference, std::abs(x));
  }
  progress(fmt::format("one rank, explicit form, {}", name_of(o.workload.dtype)));
  const DecodeRun yardstick = one_rank(o.workload, weights, expected.read, true, heartbeat);
  expected.bound =
      3 * max_difference(yardstick, expected.reference) + 8 * epsilon_of(o.workload.dtype) * expected.max_reference;
  return expected;
}

/// Between processes one computes it, and the others need the tokens alone.
Expected shared_expected(const DecodeCompareOptions& o, const ModelWeights& weights,
                         const std::function<void(const std::string&)>& progress) {
  if (o.group.backend == Backend::threads) return expected_of(o, weights, nullptr, progress);
  const DecodeWorkload& w = o.workload;
  Expected expected;
  run_group(o.group, [&](RankContext& ctx) {
    const bool at_root = ctx.rank() == 0;
    if (at_root) expected = expected_of(o, weights, &ctx.heartbeat(), progress);
    const Tensor tokens =
        ctx.empty("tokens of the reference", MemoryClass::communication, DType::f64, {w.tokens, w.batch});
    double* next = tokens.data<double>();
    if (at_root) {
      for (const auto& step : expected.read) next = std::copy(step.begin(), step.end(), next);
    }
    ctx.comm().broadcast("tokens of the reference", tokens, 0);
    if (at_root) return;
    for (std::int64_t step = 0; step < w.tokens; ++step, next += w.batch) {
      expected.read.emplace_back(next, next + w.batch);
    }
  });
  return expected;
}

void check_logits(const Expected& expected, std::int64_t vocabulary, DecodeLayoutReport& report) {
  report.max_logit_error = max_difference(report.run, expected.reference);
  report.bound = expected.bound;
  for (std::size_t step = 0; step < expected.reference.chosen.size() && report.first_different_token < 0; ++step) {
    for (std::size_t b = 0; b < expected.reference.chosen[step].size(); ++b) {
      const auto mine = report.run.chosen[step][b], theirs = expected.reference.chosen[step][b];
      if (mine == theirs) continue;
      const double* row = expected.reference.logits[step].data() + static_cast<std::int64_t>(b) * vocabulary;
      report.first_different_token = static_cast<std::int64_t>(step);
      report.difference_excused = row[theirs] - row[mine] <= 2 * expected.bound;
      break;
    }
  }
}

/// What went to other ranks' experts and came to the rank's own, of all layers.
RoutedRows routed_rows_of(const DecodeRun& run, const DecodeMeasure& m) {
  RoutedRows rows;
  for (const DecodeMeasure& other : run.ranks) {
    if (other.rank == m.rank) continue;
    rows.sent += static_cast<double>(m.routed_rows.at(static_cast<std::size_t>(other.rank)));
    rows.received += static_cast<double>(other.routed_rows.at(static_cast<std::size_t>(m.rank)));
  }
  return rows;
}

void check_accounts(const DecodeWorkload& w, const DecodeLayout& layout, DecodeLayoutReport& report) {
  report.bytes_agree = !report.run.ranks.empty();
  const bool routed = is_routed(layout);
  for (const DecodeMeasure& m : report.run.ranks) {
    const auto closed = [&](const RoutedRows* rows) {
      return decode_step_bytes(w.config, layout, m.rank, w.batch, w.context + w.tokens, size_of(w.dtype), rows);
    };
    const RoutedRows rows = routed ? routed_rows_of(report.run, m) : RoutedRows{};
    const auto predicted = static_cast<std::int64_t>(std::llround(closed(routed ? &rows : nullptr)));
    report.cache_bytes = std::max(report.cache_bytes, m.cache_bytes);
    report.bytes_sent = std::max(report.bytes_sent, m.bytes_sent());
    report.bytes_predicted = std::max(report.bytes_predicted, predicted);
    report.bytes_agree = report.bytes_agree && m.bytes_sent() == predicted;
    if (routed) report.bytes_uniform = std::max(report.bytes_uniform, closed(nullptr));
  }
}

/// How many layers of a kind there are, and the model with one of them.
struct LayerKind {
  std::int64_t count;
  ModelConfig config;
};
std::vector<LayerKind> layer_kinds(const ModelConfig& config) {
  const std::int64_t layers = config.num_hidden_layers;
  const std::int64_t dense =
      config.moe.n_routed_experts > 0 ? std::min(layers, config.moe.first_k_dense_replace) : layers;
  std::vector<LayerKind> kinds;
  for (const bool is_dense : {true, false}) {
    const std::int64_t count = is_dense ? dense : layers - dense;
    if (count == 0) continue;
    kinds.push_back({count, config});
    kinds.back().config.num_hidden_layers = 1;
    if (config.moe.n_routed_experts > 0) kinds.back().config.moe.first_k_dense_replace = is_dense ? 1 : 0;
  }
  return kinds;
}

/// Of ranks that do the same, one is traced.
DecodeRunOptions dry_options(const DecodeCompareOptions& options, const DecodeLayout& layout, const DecodeWorkload& w) {
  DecodeRunOptions run{.group = options.group, .layout = layout, .read = first_tokens(w)};
  run.group.backend = Backend::threads;
  run.group.dry_run = true;
  run.equal_ranks = equal_ranks(w.config, layout, w.batch, w.context + w.tokens);
  return run;
}

/// All layers, for pipelines, whose ranks have different ones.
DecodeRun dry_run_of_all_layers(const DecodeCompareOptions& options, const DecodeLayout& layout) {
  DecodeWorkload last = options.workload;
  last.prompts.clear();
  last.context += last.tokens - 1;
  last.tokens = 1;
  return run_decode(last, initial_model_weights(last.config, 1, last.dtype, 0.02, true),
                    dry_options(options, layout, last));
}

/// One layer of each kind, counted for all.
DecodeRun dry_run_of(const DecodeCompareOptions& options, const std::vector<LayerKind>& kinds,
                     const std::vector<ModelWeights>& weights, const DecodeLayout& layout) {
  if (layout.pp > 1) return dry_run_of_all_layers(options, layout);
  DecodeRun all;
  for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
    DecodeWorkload one = options.workload;
    one.config = kinds[kind].config;
    one.prompts.clear();
    one.context += one.tokens - 1;  // the last step alone, at its context
    one.tokens = 1;
    const DecodeRun run = run_decode(one, weights[kind], dry_options(options, layout, one));
    all.ranks.resize(run.ranks.size());
    for (std::size_t rank = 0; rank < run.ranks.size(); ++rank) {
      DecodeMeasure& sum = all.ranks[rank];
      const DecodeMeasure& m = run.ranks[rank];
      sum.rank = m.rank;
      sum.cache_bytes += kinds[kind].count * m.cache_bytes;
      sum.messages += kinds[kind].count * m.messages;
      for (const auto& [name, bytes] : m.bytes_by_name) sum.bytes_by_name[name] += kinds[kind].count * bytes;
      for (const auto& [name, flops] : m.flops_by_name) {
        sum.flops_by_name[name] += static_cast<double>(kinds[kind].count) * flops;
      }
      sum.peak_activation_bytes = std::max(sum.peak_activation_bytes, m.peak_activation_bytes);
      sum.routed_rows.resize(std::max(sum.routed_rows.size(), m.routed_rows.size()));
      for (std::size_t to = 0; to < m.routed_rows.size(); ++to) {
        sum.routed_rows[to] += kinds[kind].count * m.routed_rows[to];
      }
    }
  }
  return all;
}

/// Layouts don't know of each other: every other one on a second thread.
void dry_runs(const DecodeCompareOptions& options, const std::vector<DecodeLayout>& layouts,
              std::vector<DecodeLayoutReport>& rows) {
  const std::vector<LayerKind> kinds = layer_kinds(options.workload.config);
  std::vector<ModelWeights> shapes;
  for (const LayerKind& kind : kinds) {
    shapes.push_back(initial_model_weights(kind.config, 1, options.workload.dtype, 0.02, true));
  }
  const auto every_other = [&](std::size_t first) {
    for (std::size_t i = first; i < layouts.size(); i += 2)
      rows[i].run = dry_run_of(options, kinds, shapes, layouts[i]);
  };
  std::future<void> second = std::async(std::launch::async, every_other, 1);
  every_other(0);
  second.get();
}

DecodeRun real_run_of(const DecodeCompareOptions& options, const ModelWeights& weights, const Expected& expected,
                      const DecodeLayout& layout, const std::string& name) {
  DecodeRunOptions run{.group = options.group, .layout = layout, .read = expected.read};
  if (options.dump) {
    run.dump = [&](int rank, const std::string& tensor, const Tensor& t) {
      options.dump(rank, fmt::format("{}/{}", name, tensor), t);
    };
  }
  return run_decode(options.workload, weights, run);
}

/// HOP-B sends a message a sequence. With c of attention a sequence and layer and L of latency a message (c below the
/// whole exchange m = L + t), a layer takes c + B·(L + t); in one message it takes B·c + L + B·t, which is less where
/// L > c.
std::string overlap_note(const DecodeLayout& layout, const DecodeCompareOptions& o, const DecodeRun& run) {
  const DecodeShards& s = layout.shards;
  const std::int64_t parts = std::min<std::int64_t>(layout.pp, o.workload.batch);
  const bool overlaps = s.scheme == DecodeScheme::helix && layout.hop_b && s.kvp > 1 && o.workload.batch > parts;
  if (!overlaps || !o.group.link.emulated) return {};
  const std::int64_t layers = (o.workload.config.num_hidden_layers + layout.pp - 1) / layout.pp;
  const double attention_s = longest_part(run, "attention") / static_cast<double>(layers * o.workload.batch);
  if (o.group.link.latency_s <= attention_s) return {};
  return fmt::format(
      "HOP-B pays {} of latency for each sequence, more than the {} of attention that it hides behind: by the formula "
      "hopb=off, one message for all, is quicker",
      format_seconds(o.group.link.latency_s), format_seconds(attention_s));
}

std::string why_omitted(const DecodeLayout& layout, const DecodeCompareOptions& o) {
  if (layout.devices() != o.group.num_ranks) {
    return fmt::format("it has {} ranks, {} were asked for", layout.devices(), o.group.num_ranks);
  }
  if (layout.pp > o.workload.batch) {
    return fmt::format("{} sequences are fewer than the pipeline's {} stages, some of which would idle",
                       o.workload.batch, layout.pp);
  }
  if (layout.shards.data_parallel > o.workload.batch) {
    return fmt::format("{} sequences are fewer than the {} ranks, some of which would have none", o.workload.batch,
                       layout.shards.data_parallel);
  }
  return why_step_unfit(layout, o.workload.config, o.workload.tpla.get());
}

}  // namespace

bool DecodeLayoutReport::within_bound() const {
  return dry || (std::isfinite(max_logit_error) && max_logit_error <= bound && difference_excused);
}

bool DecodeCompareReport::good() const {
  return std::all_of(layouts.begin(), layouts.end(), [](const auto& l) { return l.good(); });
}

bool DecodeCompareReport::bound_says_little() const {
  return std::any_of(layouts.begin(), layouts.end(), [&](const auto& l) { return l.bound > 0.1 * max_reference; });
}

double decode_step_bytes(const ModelConfig& c, const DecodeLayout& layout, int rank, std::int64_t batch,
                         std::int64_t context, std::int64_t element_bytes, const RoutedRows* routed) {
  const auto element = static_cast<double>(element_bytes);
  const DecodeShards& s = layout.shards;
  const int stage = rank / layout.stage_devices(), place = rank % layout.stage_devices();
  const IndexRange layers = balanced_part(c.num_hidden_layers, layout.pp, stage);
  const std::int64_t dense = c.moe.n_routed_experts > 0 ? c.moe.first_k_dense_replace : c.num_hidden_layers;
  const std::int64_t dense_here = std::clamp<std::int64_t>(dense - layers.begin, 0, layers.count);
  double bytes = stage + 1 < layout.pp ? pipeline_elements(c, batch) * element : 0;
  // The batch passes in parts, so that shares of a sum may round otherwise than those of the whole.
  const std::int64_t parts = std::min<std::int64_t>(layout.pp, batch);
  for (std::int64_t part = 0; part < parts; ++part) {
    const std::int64_t rows = balanced_part(batch, parts, part).count;
    const std::int64_t group_rows = balanced_part(rows, s.data_parallel, place / s.group()).count;
    const double attention =
        decode_attention_transfers(c, s, group_rows, context, place % s.group()).bytes_sent(element);
    for (const bool moe : {false, true}) {
      const auto count = static_cast<double>(moe ? layers.count - dense_here : dense_here);
      if (count == 0) continue;
      RoutedRows of_layer;
      if (routed != nullptr) of_layer = {routed->sent / count, routed->received / count};
      const auto ffn = decode_ffn_transfers(c, s, moe, rows, place, routed != nullptr ? &of_layer : nullptr);
      bytes += count * (attention + ffn.bytes_sent(element));
    }
  }
  return bytes;
}

std::vector<std::string> all_decode_layouts(const ModelConfig& config, int p) {
  const bool latent = config.attention == AttentionKind::mla, moe = config.moe.n_routed_experts > 0;
  std::vector<std::string> layouts = {fmt::format("tp:{}", p)};
  if (moe && p > 1) layouts.push_back(fmt::format("tp:{},ep={}", p, p));
  for (const char* name : {"gla", "tpla"}) {
    if (p % 2 == 0) layouts.push_back(fmt::format("{}:g=2,tp={}", name, p / 2));
  }
  if (p > 1) layouts.insert(layouts.end(), {fmt::format("exact-latent:{}", p), fmt::format("kvp:{}", p)});
  std::vector<int> columns = {1};
  for (int tpa = 2; tpa <= std::min(p, 8); tpa *= 2) {
    if (p % tpa == 0 && (!latent || tpa == 2)) columns.push_back(tpa);
  }
  for (const int tpa : columns) {
    if (p / tpa > 1) layouts.push_back(fmt::format("medha:kvp={},tpa={}", p / tpa, tpa));
  }
  for (const int tpa : columns) {
    const std::string helix = fmt::format("helix:kvp={},tpa={}", p / tpa, tpa);
    layouts.push_back(fmt::format("{},tpf={},ep=1", helix, p));
    if (tpa > 1 || p == 1) continue;
    if (moe && p > 2 && p % 2 == 0) layouts.push_back(fmt::format("{},tpf={},ep=2", helix, p / 2));
    if (moe) layouts.push_back(fmt::format("{},tpf=1,ep={}", helix, p));
    layouts.push_back(fmt::format("{},tpf={},ep=1,q=gather", helix, p));
    if (latent) layouts.push_back(fmt::format("{},tpf={},ep=1,wuv=before", helix, p));
    layouts.push_back(fmt::format("{},tpf={},ep=1,hopb=off", helix, p));
  }
  if (p > 1) {
    const bool cuts_columns = moe && config.moe.n_routed_experts % p != 0;
    layouts.insert(layouts.end(), {fmt::format("dp-ep:{}{}", p, cuts_columns ? fmt::format(",tpf={}", p) : ""),
                                   fmt::format("pp:{}", p)});
  }
  return layouts;
}

DecodeCompareReport compare_decode(const DecodeCompareOptions& options, const ModelWeights& weights,
                                   const std::function<void(const std::string&)>& progress) {
  DecodeCompareReport report{.options = options};
  const bool dry = options.group.dry_run, at_root = is_root(options.group);
  const DecodeWorkload& w = options.workload;
  Expected expected;
  if (!dry) {
    expected = shared_expected(options, weights, progress);
    report.max_reference = expected.max_reference;
  }
  std::vector<DecodeLayout> layouts;
  for (const std::string& text : options.layouts) {
    const DecodeLayout layout = complete_layout(parse_decode_layout(text, w.config), w.tpla.get());
    if (const std::string reason = why_omitted(layout, options); !reason.empty()) {
      report.omitted.push_back({text, reason});
      continue;
    }
    report.layouts.push_back({.name = std::string(layout.family()),
                              .layout = text,
                              .exact = layout.shards.is_exact(),
                              .dry = dry,
                              .note = cache_copies_note(layout, w.config)});
    layouts.push_back(layout);
  }
  if (dry) dry_runs(options, layouts, report.layouts);
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    DecodeLayoutReport& row = report.layouts[i];
    if (!dry) {
      progress(fmt::format("{} on {} ranks", row.layout, options.group.num_ranks));
      row.run = real_run_of(options, weights, expected, layouts[i], row.layout);
    }
    if (at_root) {
      check_accounts(w, layouts[i], row);
      if (!dry) {
        check_logits(expected, w.config.vocab_size, row);
        if (const std::string note = overlap_note(layouts[i], options, row.run); !note.empty()) {
          row.note += (row.note.empty() ? "" : "; ") + note;
        }
      }
    }
    row.run.logits.clear();
  }
  return report;
}

}  // namespace isomer
