#include "plan/decode_report.h"

#include <algorithm>

#include "core/error.h"
#include "core/quantity_text.h"
#include "plan/explain.h"
#include "sharding/weight_slices.h"

namespace isomer {

namespace {

bool may_win(const DecodeLayout& layout) { return layout.shards.is_exact(); }

ChosenLayout explain(const DecodePlan& plan, const std::string& question, const DecodePoint& point,
                     const Objective& objective) {
  const DecodeProblem& problem = plan.options.problem;
  const DecodeLayout& layout = plan.search.layout_of(point);
  ChosenLayout chosen{.question = question, .point = point, .layout = to_string(layout)};
  chosen.time = decode_step_time(problem, plan.assumed, layout, point.batch);
  chosen.memory = decode_memory(problem, plan.assumed, layout, point.batch);
  chosen.operations = priced_operations(problem, plan.assumed, layout, point.batch);
  chosen.bound = bound_of_step(chosen.operations);
  chosen.next = next_best(problem, plan.assumed, plan.search, point, objective);
  if (chosen.next) chosen.next_layout = to_string(plan.search.layout_of(chosen.next->point));
  return chosen;
}

/// What to do where nothing fits, with the number of devices that would do.
std::string memory_remedy(const DecodePlan& plan) {
  const DecodePlanOptions& o = plan.options;
  if (!o.search.layouts.empty()) return "name a wider layout, a narrower precision or a shorter context";
  if (const auto enough = fewest_devices(o.problem, plan.assumed, o.search)) {
    return fmt::format("give it {} devices ({} at batch {} fits), a narrower precision or a shorter context",
                       enough->layout.devices(), to_string(enough->layout), enough->batch);
  }
  return fmt::format(
      "no layout fits on up to {} devices either, which is as far as is looked; give it a narrower precision or a "
      "shorter context",
      std::max(o.search.max_devices, std::min(plan.assumed.max_devices(), kMaxDecodeDevices)));
}

/// Of the first layout that was named, if any: "; tp:7: …", with what would fit.
std::string what_would_fit(const DecodePlan& plan) {
  const DecodePlanOptions& o = plan.options;
  if (o.search.layouts.empty()) return "";
  const DecodeLayout& layout = o.search.layouts.front();
  const DecodeShards& s = layout.shards;
  const ModelConfig& c = o.problem.config;
  const bool columns = s.scheme == DecodeScheme::helix || s.scheme == DecodeScheme::medha;
  const int devices = s.scheme == DecodeScheme::medha ? s.tpa : s.devices();
  std::string hint;
  switch (why_unfit(layout, c)) {
    case Unfit::heads: hint = columns ? why_columns_unfit(c, s.kvp, s.tpa) : why_heads_unfit(c, s.group()); break;
    case Unfit::experts:
    case Unfit::ffn_width: hint = why_ffn_unfit(c, s.tpf, s.ep); break;
    case Unfit::ffn_devices: hint = fmt::format("take tpf and ep whose product is {}", devices); break;
    case Unfit::layers: hint = fmt::format("take pp of at most {}", c.num_hidden_layers); break;
    case Unfit::fits: hint = fmt::format("take batches that {} divides", s.data_parallel * layout.pp); break;
    default: break;
  }
  return hint.empty() ? "" : fmt::format("; {}: {}", to_string(layout), hint);
}

void refuse_memory(const DecodePlan& plan) {
  const DecodePlanOptions& o = plan.options;
  const auto least = least_memory(o.problem, plan.assumed, o.search);
  if (!least) {
    std::string reasons;
    for (int i = 1; i < kNumUnfit; ++i) {
      if (plan.search.unfit[static_cast<std::size_t>(i)] == 0) continue;
      reasons += fmt::format("{}{}", reasons.empty() ? "" : "; ", reason_of(static_cast<Unfit>(i)));
    }
    invalid_argument("no layout of {} on up to {} devices can run: {}{}", o.problem.config.name, o.search.max_devices,
                     reasons, what_would_fit(plan));
  }
  const DecodeMemory& m = least->memory;
  const double capacity = memory_capacity(o.problem, plan.assumed);
  invalid_argument(
      "nothing fits: memory binds. {} with {} tokens a sequence on up to {} devices of {}: the layout that needs "
      "least, "
      "{} at batch {}, takes {} a device (weights {}, cache {}, workspace {}, reserved {}); {}",
      o.problem.config.name, o.problem.context, o.search.max_devices, format_bytes(capacity), to_string(least->layout),
      least->batch, format_bytes(m.total()), format_bytes(m.weights), format_bytes(m.cache), format_bytes(m.workspace),
      format_bytes(m.reserved), memory_remedy(plan));
}

void choose(DecodePlan& plan) {
  const DecodePlanOptions& o = plan.options;
  const Objective speed{.filter = may_win, .quickest = true};
  const auto fastest = best_point(plan.search, speed);
  if (!fastest && !plan.search.points.empty()) {
    invalid_argument(
        "--layouts: none of those that fit is exact ({}), and a layout that is not exact is never chosen; name an "
        "exact "
        "one beside it (tp:{})",
        to_string(plan.search.layout_of(plan.search.points.front())), plan.search.points.front().devices);
  }
  if (!fastest) refuse_memory(plan);
  const Objective throughput{.filter = may_win, .ttl_s = o.ttl_s};
  const auto best = best_point(plan.search, throughput);
  if (!best) {
    const auto chosen = explain(plan, "", *fastest, speed);
    invalid_argument(
        "--ttl {:.6g} ms: no layout is so quick. The quickest, {} at batch {}, takes {:.6g} ms a token, bound by {}; "
        "the nearest limit that can be met is --ttl {:.3g}ms",
        1e3 * *o.ttl_s, chosen.layout, fastest->batch, 1e3 * fastest->step_s, chosen.bound, 1.005e3 * fastest->step_s);
  }
  const std::string limit = o.ttl_s ? fmt::format(" within {:.3g} ms a token", 1e3 * *o.ttl_s) : "";
  plan.chosen.push_back(explain(plan, "most tokens/s a device" + limit, *best, throughput));
  plan.chosen.push_back(explain(plan, "quickest", *fastest, speed));
  Objective before = throughput;
  before.filter = [](const DecodeLayout& layout) { return may_win(layout) && is_baseline(layout); };
  if (const auto point = best_point(plan.search, before)) {
    plan.chosen.push_back(explain(plan, fmt::format("best baseline{}", limit), *point, before));
  }
  before.quickest = true;
  if (const auto point = best_point(plan.search, before)) {
    plan.chosen.push_back(explain(plan, "quickest baseline", *point, before));
  }
}

void collect_frontiers(DecodePlan& plan) {
  std::vector<std::string> families;
  for (const DecodeLayout& layout : plan.search.layouts) {
    const std::string family(layout.family());
    if (std::find(families.begin(), families.end(), family) == families.end()) families.push_back(family);
  }
  for (const std::string& family : families) {
    FamilyFrontier frontier{.family = family};
    frontier.points =
        pareto_frontier(plan.search, [&](const DecodeLayout& layout) { return layout.family() == family; });
    if (frontier.points.empty()) continue;
    frontier.exact = plan.search.layout_of(frontier.points.front()).shards.is_exact();
    plan.frontiers.push_back(std::move(frontier));
  }
  plan.overall = pareto_frontier(plan.search, may_win);
}

}  // namespace

bool is_baseline(const DecodeLayout& layout) {
  const DecodeScheme scheme = layout.shards.scheme;
  return scheme == DecodeScheme::tp || scheme == DecodeScheme::medha;
}

DecodePlan plan_decode(DecodePlanOptions options) {
  DecodePlan plan{.options = std::move(options)};
  const DecodePlanOptions& o = plan.options;
  plan.assumed = with_assumptions(o.hardware, o.assumptions);
  o.progress("searching");
  plan.search = search_decode(o.problem, plan.assumed, o.search);
  choose(plan);
  for (const ChosenLayout& chosen : plan.chosen) add_stand_ins(plan.assumed, chosen.operations, plan.stand_ins);
  collect_frontiers(plan);
  if (o.sensitivity) {
    plan.sensitivity =
        study_sensitivity({.problem = o.problem,
                           .hardware = o.hardware,
                           .base = o.assumptions,
                           .options = o.search,
                           .ours = [](const DecodeLayout& l) { return l.shards.scheme == DecodeScheme::helix; },
                           .theirs = is_baseline,
                           .progress = o.progress});
    const LayoutRatios& base = plan.sensitivity->base;
    if (base.interactivity == 0) plan.sensitivity.reset();  // one of the two has no layout that fits
  }
  return plan;
}

}  // namespace isomer
