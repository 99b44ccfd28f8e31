#include "study/decode_run.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "comm/communicator.h"
#include "infer/sampling.h"
#include "infer/seeded_cache.h"
#include "kernels/dispatch.h"

namespace isomer {

namespace {

std::int64_t length_of(const DecodeWorkload& w) { return w.context + w.tokens; }

EngineOptions engine_options(const DecodeWorkload& w, const DecodeLayout& layout, bool dry) {
  EngineOptions o{.config = w.config, .layout = layout, .tpla = w.tpla};
  // Positions beyond the model's are measured all the same; the report has a note.
  o.config.max_position_embeddings = std::max(o.config.max_position_embeddings, length_of(w));
  // Dry, a sequence is one page, so that page tables of a million tokens cost nothing.
  if (dry) o.page_tokens = cache_shards_of(layout).count(0, length_of(w));
  const std::vector<std::int64_t> lengths(static_cast<std::size_t>(w.batch), length_of(w));
  o.cache_tokens = cache_tokens_for(lengths, layout, o.page_tokens);
  o.cache_pages = cache_pages_for(lengths, layout, o.page_tokens);
  return o;
}

std::vector<double> widened(const Tensor& t) {
  std::vector<double> wide(static_cast<std::size_t>(t.numel()));
  visit_dtype(t.dtype(), [&]<class T>() {
    std::transform(t.data<T>(), t.data<T>() + wide.size(), wide.begin(), [](T x) { return static_cast<double>(x); });
  });
  return wide;
}

struct StepTimes {
  double seconds, waiting;
  std::map<std::string, double> by_part;
};

/// One rank's run.
class DecodeRank {
 public:
  DecodeRank(RankContext& ctx, const DecodeWorkload& w, const ModelWeights& weights, const DecodeRunOptions& o)
      : ctx_(ctx),
        w_(w),
        o_(o),
        virtual_(clock_is_virtual(o.group)),
        engine_(ctx, engine_options(w, o.layout, ctx.dry_run()), weights) {
    for (std::int64_t b = 0; b < w.batch; ++b) {
      const int id = engine_.add_sequence();
      sequences_.push_back(id);
      if (!w.prompts.empty()) engine_.prefill(ctx, id, w.prompts.at(static_cast<std::size_t>(b)));
    }
    if (w.prompts.empty()) append_seeded_rows(ctx, engine_, sequences_, w.context, w.seed);
  }

  DecodeMeasure measure(DecodeRun& run) {
    std::vector<StepTimes> times;
    DecodeMeasure m{.rank = ctx_.rank(), .cache_bytes = ctx_.memory().current_bytes(MemoryClass::cache)};
    std::vector<std::int32_t> read = o_.read.at(0);
    for (std::int64_t step = 0; step < w_.tokens; ++step) {
      if (step > 0 && static_cast<std::size_t>(step) < o_.read.size()) read = o_.read[static_cast<std::size_t>(step)];
      const bool last = step == w_.tokens - 1;
      ctx_.ledger().clear();
      ctx_.ops().clear();
      if (last && !ctx_.dry_run()) observe(m);
      ctx_.memory().open_window();
      ctx_.comm().barrier();
      const double begin = now(), waited_before = waited();
      const std::vector<double> logits = decode(read);
      if (step > 0 || last) times.push_back({now() - begin, waited() - waited_before, parts()});
      ctx_.set_observer({});
      if (ctx_.dry_run()) continue;
      read = chosen(logits);
      if (ctx_.rank() == 0) {
        run.logits.push_back(logits);
        run.chosen.push_back(read);
      }
    }
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end(),
                     [](const StepTimes& a, const StepTimes& b) { return a.seconds < b.seconds; });
    m.seconds = middle->seconds;
    m.seconds_waiting = middle->waiting;
    m.seconds_by_part = std::move(middle->by_part);
    if (ctx_.dry_run()) enter_dry_routing(m);
    account(m);
    return m;
  }

 private:
  double now() const { return virtual_ ? ctx_.clock().now_s() : wall_clock_s(); }
  double waited() const { return virtual_ ? ctx_.clock().waited_s() : ctx_.ops().waiting_wall_s(); }

  std::vector<double> decode(const std::vector<std::int32_t>& read) {
    std::vector<Engine::Input> inputs;
    for (std::size_t b = 0; b < sequences_.size(); ++b) inputs.push_back({sequences_[b], {&read.at(b), 1}});
    if (!o_.explicit_form) {
      const Tensor logits = engine_.decode(ctx_, inputs);
      return ctx_.dry_run() ? std::vector<double>() : widened(logits);
    }
    std::vector<double> all;
    for (const Engine::Input& input : inputs) {
      const auto one = widened(engine_.prefill(ctx_, input.sequence, input.ids));
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

  std::vector<std::int32_t> chosen(const std::vector<double>& logits) const {
    std::vector<std::int32_t> tokens;
    const auto vocabulary = static_cast<std::size_t>(w_.config.vocab_size);
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
      tokens.push_back(sample_token(std::span(logits).subspan(b * vocabulary, vocabulary), {}, 0));
    }
    return tokens;
  }

  /// Own rows that `experts` [rows · experts a token] sends to each rank.
  void enter_routing(DecodeMeasure& m, std::span<const std::int32_t> experts) const {
    const MoeConfig& moe = w_.config.moe;
    const auto rows = rows_by_device(experts, moe.num_experts_per_tok, moe.n_routed_experts, o_.layout.devices());
    m.routed_rows.resize(rows.size());
    for (std::size_t rank = 0; rank < rows.size(); ++rank) m.routed_rows[rank] += rows[rank];
  }
  void enter_dry_routing(DecodeMeasure& m) const {
    const ModelConfig& c = w_.config;
    if (!is_routed(o_.layout)) return;
    const std::int64_t rows = balanced_part(w_.batch, o_.layout.devices(), ctx_.rank()).count;
    for (std::int64_t layer = c.moe.first_k_dense_replace; layer < c.num_hidden_layers; ++layer) {
      enter_routing(m, dry_routing(c, layer, ctx_.rank(), rows).experts);
    }
  }
  void observe(DecodeMeasure& m) {
    const bool routed = is_routed(o_.layout);
    if (!routed && !o_.dump) return;
    ctx_.set_observer([this, routed, &m](std::string_view name, const Tensor& t) {
      if (routed && name.ends_with(".experts")) {
        enter_routing(m, std::vector<std::int32_t>(t.data<float>(), t.data<float>() + t.numel()));
      }
      if (o_.dump) o_.dump(ctx_.rank(), std::string(name), t);
    });
  }

  void account(DecodeMeasure& m) const {
    for (const LedgerEntry& entry : ctx_.ledger().entries()) {
      if (entry.phase != Phase::forward) continue;
      m.bytes_by_name[fmt::format("{} {}", name_of(entry.collective), entry.tensor)] += entry.bytes_sent;
      m.messages += entry.messages;
    }
    m.peak_activation_bytes = ctx_.memory().peak_activation_bytes();
    for (const auto& [key, summary] : ctx_.ops().summaries()) {
      if (key.phase == Phase::forward && summary.cost.flops > 0) m.flops_by_name[key.name] += summary.cost.flops;
    }
  }
  /// Of the step since the record was cleared.
  std::map<std::string, double> parts() const {
    std::map<std::string, double> seconds;
    for (const auto& [key, summary] : ctx_.ops().summaries()) {
      if (key.phase != Phase::forward) continue;
      seconds[std::string(decode_part_of(key.name))] += virtual_ ? summary.cpu_s : summary.wall_s;
    }
    return seconds;
  }

  RankContext& ctx_;
  const DecodeWorkload& w_;
  const DecodeRunOptions& o_;
  bool virtual_;
  Engine engine_;
  std::vector<int> sequences_;
};

nlohmann::json to_json(const DecodeMeasure& m) {
  return {{"rank", m.rank},
          {"cache", m.cache_bytes},
          {"bytes", m.bytes_by_name},
          {"messages", m.messages},
          {"flops", m.flops_by_name},
          {"peak", m.peak_activation_bytes},
          {"routed", m.routed_rows},
          {"seconds", m.seconds},
          {"waiting", m.seconds_waiting},
          {"parts", m.seconds_by_part}};
}

DecodeMeasure measure_from(const nlohmann::json& json) {
  return {.rank = json.at("rank"),
          .cache_bytes = json.at("cache"),
          .bytes_by_name = json.at("bytes").get<std::map<std::string, std::int64_t>>(),
          .messages = json.at("messages"),
          .flops_by_name = json.at("flops").get<std::map<std::string, double>>(),
          .peak_activation_bytes = json.at("peak"),
          .routed_rows = json.at("routed").get<std::vector<std::int64_t>>(),
          .seconds = json.at("seconds"),
          .seconds_waiting = json.at("waiting"),
          .seconds_by_part = json.at("parts").get<std::map<std::string, double>>()};
}

/// The measures of traced ranks, for those that do the same.
std::vector<DecodeMeasure> of_all_ranks(const std::vector<DecodeMeasure>& traced, const std::vector<int>& equal) {
  std::vector<DecodeMeasure> all;
  for (const int like : equal) {
    const auto found = std::find_if(traced.begin(), traced.end(), [&](const auto& m) { return m.rank == like; });
    ISOMER_CHECK(found != traced.end(), "rank {} was not traced", like);
    all.push_back(*found);
    all.back().rank = static_cast<int>(all.size()) - 1;
  }
  return all;
}

}  // namespace

bool is_routed(const DecodeLayout& layout) { return layout.shards.data_parallel > 1 && layout.shards.ep > 1; }

std::string_view decode_part_of(std::string_view name) {
  struct Part {
    std::string_view part;
    std::vector<std::string_view> words;
  };
  // The first that has a word in the name.
  static const std::vector<Part> parts = {
      {"exchange", {"pack_partial", "merge_packed", "weigh_partial"}},
      {"attention",
       {"attention_forward", "merge_attention", "partial attention", "logits", "p ĉ", "softmax", "cache's type"}},
      {"router", {"router", "routing"}},
      {"ffn", {"gate_proj", "up_proj", "down_proj", "expert", "silu", "post_attention"}},
      {"other", {"lm_head", "embed", "logit scale"}},
      {"projections",
       {"_proj", "absorb", "W_UV", "rope", "layernorm", "q_pe", "cache", "bias", "concatenate", "latent", "kv_a",
        "load "}}};
  for (const Part& part : parts) {
    for (const std::string_view word : part.words) {
      if (name.find(word) != std::string_view::npos) return part.part;
    }
  }
  return "other";
}

std::int64_t DecodeMeasure::bytes_sent() const {
  std::int64_t sum = 0;
  for (const auto& [name, bytes] : bytes_by_name) sum += bytes;
  return sum;
}

double DecodeRun::seconds() const {
  double longest = 0;
  for (const DecodeMeasure& m : ranks) longest = std::max(longest, m.seconds);
  return longest;
}

const DecodeMeasure& DecodeRun::busiest() const {
  ISOMER_CHECK(!ranks.empty(), "the run has no measures here");
  return *std::max_element(ranks.begin(), ranks.end(),
                           [](const auto& a, const auto& b) { return a.bytes_sent() < b.bytes_sent(); });
}

const DecodeMeasure& DecodeRun::critical() const {
  ISOMER_CHECK(!ranks.empty(), "the run has no measures here");
  return *std::min_element(ranks.begin(), ranks.end(),
                           [](const auto& a, const auto& b) { return a.seconds_waiting < b.seconds_waiting; });
}

DecodeRun run_decode(const DecodeWorkload& workload, const ModelWeights& weights, const DecodeRunOptions& options) {
  DecodeRun run;
  run.virtual_clock = clock_is_virtual(options.group);
  const auto is_traced = [&](int rank) {
    return options.equal_ranks.empty() || options.equal_ranks.at(static_cast<std::size_t>(rank)) == rank;
  };
  run_group(options.group, [&](RankContext& ctx) {
    if (!is_traced(ctx.rank())) {
      join_engine_splits(ctx.comm(), engine_options(workload, options.layout, true));
      return;
    }
    DecodeRun elsewhere;  // ranks other than 0 keep nothing
    DecodeRun& results = ctx.rank() == 0 ? run : elsewhere;
    const DecodeMeasure measure = DecodeRank(ctx, workload, weights, options).measure(results);
    if (ctx.dry_run()) {
      run.ranks.push_back(measure);
      return;
    }
    for (const std::string& text : ctx.comm().gather_text(to_json(measure).dump())) {
      results.ranks.push_back(measure_from(nlohmann::json::parse(text)));
    }
  });
  std::sort(run.ranks.begin(), run.ranks.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  if (!options.equal_ranks.empty()) run.ranks = of_all_ranks(run.ranks, options.equal_ranks);
  return run;
}

double longest_part(const DecodeRun& run, const std::string& part) {
  double longest = 0;
  for (const DecodeMeasure& m : run.ranks) {
    const auto found = m.seconds_by_part.find(part);
    if (found != m.seconds_by_part.end()) longest = std::max(longest, found->second);
  }
  return longest;
}

}  // namespace isomer
