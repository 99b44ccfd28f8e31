// Training layouts: text, memory by formula, and a search that explains itself.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "plan/train_parameters.h"
#include "plan/train_report.h"

namespace isomer {
namespace {

const ModelConfig& v3() {
  static const ModelConfig config = load_model_config("deepseek-v3");
  return config;
}
TrainProblem problem(std::int64_t seq = 16384) { return {.config = v3(), .seq = seq, .batch = 64}; }

TEST(TrainLayoutText, NamesEveryAxisThatIsMoreThanOne) {
  EXPECT_EQ(to_string(TrainLayout{.scheme = "laga", .sp = 8, .dp = 4}), "laga:8,dp:4");
  EXPECT_EQ(to_string(TrainLayout{.scheme = "explicit",
                                  .sp = 2,
                                  .tp = 4,
                                  .pp = 2,
                                  .dp = 8,
                                  .ep = 16,
                                  .zero = 1,
                                  .recompute = TrainRecompute::attention}),
            "explicit:2,recompute=attention,tp:4,pp:2,dp:8,ep=16,zero=1");
  std::set<std::string> seen;
  for (const TrainLayout& layout : enumerate_train_layouts(v3(), 48, schemes_with_work())) {
    EXPECT_EQ(layout.devices(), 48);
    EXPECT_TRUE(seen.insert(to_string(layout)).second) << to_string(layout);
  }
  EXPECT_GT(seen.size(), 500u);
}

TEST(TrainLayoutFit, SaysWhy) {
  const auto unfit = [](TrainLayout layout, std::int64_t batch = 64) {
    layout.scheme = "laga";
    return why_unfit(layout, v3(), 16384, batch);
  };
  EXPECT_EQ(unfit({.sp = 8, .dp = 4}), TrainUnfit::fits);
  EXPECT_EQ(unfit({.sp = 64, .tp = 4}), TrainUnfit::heads);
  EXPECT_EQ(unfit({.sp = 6, .dp = 4}), TrainUnfit::heads);
  EXPECT_EQ(unfit({.dp = 3, .ep = 3}), TrainUnfit::experts);
  EXPECT_EQ(unfit({.pp = 64}), TrainUnfit::layers);
  EXPECT_EQ(unfit({.dp = 64}, 32), TrainUnfit::batch);
}

TEST(TrainMemory, StatesAreCutAsZeroSays) {
  const Hardware h100 = load_hardware("h100");
  const auto memory = [&](int zero) {
    return train_memory(problem(), h100, {.scheme = "laga", .sp = 8, .dp = 8, .ep = 64, .zero = zero});
  };
  const TrainParameters p = train_parameters(v3(), {.scheme = "laga", .sp = 8, .dp = 8, .ep = 64});
  // 671,026,419,200 parameters less the last norm; of the routed experts, four of 256 a layer here.
  const double routed = 58.0 * 256 * 3 * 7168 * 2048;
  EXPECT_EQ(p.experts, routed / 64);
  EXPECT_EQ(p.shared, 671026419200.0 - 7168 - routed);
  EXPECT_EQ(memory(0).weights, 2 * (p.shared + p.experts));
  EXPECT_EQ(memory(0).optimizer, 12 * (p.shared + p.experts));
  EXPECT_EQ(memory(1).weights, memory(0).weights);
  EXPECT_EQ(memory(1).optimizer, 12 * (p.shared / 64 + p.experts));  // experts stand on one device each
  EXPECT_EQ(memory(3).weights, 2 * (p.shared / 64 + p.experts));
  EXPECT_EQ(memory(3).gradients, 4 * (p.shared / 64 + p.experts));
}

TEST(TrainMemory, RecomputationTradesSavedForTime) {
  const Hardware h100 = load_hardware("h100");
  TrainLayout layout{.scheme = "laga", .sp = 8, .dp = 8, .ep = 64, .zero = 3};
  double saved_before = 1e18, time_before = 0;
  for (const TrainRecompute recompute :
       {TrainRecompute::none, TrainRecompute::attention, TrainRecompute::block, TrainRecompute::all}) {
    layout.recompute = recompute;
    const double saved = train_memory(problem(), h100, layout).saved;
    const double time = train_step_time(problem(), h100, layout).total();
    EXPECT_LT(saved, saved_before);
    EXPECT_GT(time, time_before);
    saved_before = saved;
    time_before = time;
  }
}

TEST(TrainMemory, AttentionIsWhatTheExecutorCounts) {
  // docs/communication.md: 466,640,896 bytes saved and 343.1 MB sent by a block of V3, 16K tokens on 8 ranks.
  const TrainAttention attention = train_attention(problem(), {.scheme = "laga", .sp = 8, .dp = 1});
  EXPECT_EQ(attention.work.saved_bytes, 466640896);
  EXPECT_NEAR(static_cast<double>(attention.sent.total()), 343.1e6, 0.05e6);
}

TEST(TrainTime, PartsAddUpAndLinksVanishAlone) {
  const Hardware h100 = load_hardware("h100");
  const TrainTime alone = train_step_time(problem(), h100, {.scheme = "explicit"});
  EXPECT_EQ(alone.sp_links + alone.tp_links + alone.ep_links + alone.pipeline_links + alone.bubble, 0);
  EXPECT_EQ(alone.gradient_links + alone.zero_links + alone.recompute, 0);
  const TrainTime spread =
      train_step_time(problem(), h100, {.scheme = "laga", .sp = 4, .tp = 2, .pp = 4, .dp = 2, .ep = 8, .zero = 3});
  for (const double part : {spread.sp_links, spread.tp_links, spread.ep_links, spread.pipeline_links, spread.bubble,
                            spread.gradient_links, spread.zero_links}) {
    EXPECT_GT(part, 0);
  }
  // A pipeline of 4 stages and 32 sequences: three more sequences' time.
  const double busy = spread.total() - spread.bubble - spread.gradient_links - spread.zero_links - spread.optimizer;
  EXPECT_NEAR(spread.bubble, 3 * busy / 32, 1e-9 * busy);
}

TEST(TrainTime, IsTheSumOfItsOperations) {
  const Hardware h100 = load_hardware("h100");
  for (const TrainRecompute recompute :
       {TrainRecompute::none, TrainRecompute::attention, TrainRecompute::block, TrainRecompute::all}) {
    for (const std::string_view scheme : {"laga,latent-ring", "explicit,ring", "laga,kv=rebuild"}) {
      const int groups = scheme == "laga,kv=rebuild" ? 1 : 2;
      const TrainLayout layout{.scheme = scheme,
                               .sp = 4,
                               .groups = groups,
                               .tp = 2,
                               .pp = 4,
                               .dp = 2,
                               .ep = 8,
                               .zero = 3,
                               .recompute = recompute};
      const TrainTime time = train_step_time(problem(), h100, layout);
      double sum = 0, last = 1e18;
      for (const PricedOperation& op : train_operations(problem(), h100, layout)) {
        EXPECT_GT(op.seconds, 0) << op.operation.name;
        EXPECT_LE(op.seconds, last) << "longest first";
        EXPECT_FALSE(op.operation.name.empty() || op.bound.empty());
        last = op.seconds;
        sum += op.seconds;
      }
      EXPECT_NEAR(sum, time.total() - time.bubble, 1e-9 * sum) << to_string(layout);
    }
  }
}

TEST(TrainTime, AssumptionsMoveWhatTheySay) {
  const Hardware h100 = load_hardware("h100");
  const TrainLayout layout{.scheme = "laga", .sp = 8, .dp = 8, .ep = 64, .zero = 3};
  const TrainTime base = train_step_time(problem(), h100, layout);
  const auto under = [&](const Assumptions& assumptions) {
    return train_step_time(problem(), with_assumptions(h100, assumptions), layout);
  };
  const TrainTime slow = under({.kernel_efficiency = 0.5});
  EXPECT_NEAR(slow.core / base.core, 2, 1e-9);
  EXPECT_NEAR(slow.optimizer / base.optimizer, 2, 1e-9);
  EXPECT_EQ(slow.sp_links, base.sp_links);
  // The forward takes 2 products of widths n + d_r and v; the backward 3 and 2 of them.
  const TrainTime backward = under({.backward_efficiency = 0.5});
  EXPECT_NEAR(backward.core / base.core, (1 + 2 * (3 * 192 + 2 * 128) / 320.0) / (1 + (3 * 192 + 2 * 128) / 320.0),
              1e-9);
  EXPECT_EQ(backward.ffn, base.ffn);
  const double links = base.sp_links + base.ep_links + base.gradient_links + base.zero_links;
  const TrainTime hidden = under({.link_overlap = 0.5});
  const double kernels = base.core + base.projections + base.ffn + base.head;
  EXPECT_NEAR(base.total() - hidden.total(), 0.5 * std::min(links, kernels), 1e-9 * links)
      << "no more than runs beside";
  EXPECT_THROW(under({.link_overlap = 1.5}), std::invalid_argument);
  EXPECT_THROW(under({.kernel_efficiency = 0}), std::invalid_argument);
}

/// Searched once, with its study of assumptions.
const TrainPlan& small_plan() {
  static const TrainPlan plan = [] {
    TrainPlanOptions options{.problem = problem(), .hardware = load_hardware("h100"), .devices = 16};
    options.problem.config = load_model_config("deepseek-v2-lite");
    return plan_train(std::move(options));
  }();
  return plan;
}

TEST(TrainPlan, AccountsForEveryLayoutAndExplains) {
  const TrainPlan& plan = small_plan();
  const auto omitted = std::accumulate(plan.search.unfit.begin(), plan.search.unfit.end(), std::int64_t{0});
  EXPECT_EQ(plan.search.examined, omitted + static_cast<std::int64_t>(plan.search.points.size()));
  ASSERT_GE(plan.best.size(), 2u);
  EXPECT_LE(plan.best[0].point.step_s, plan.best[1].point.step_s);
  EXPECT_GT(plan.best[0].utilisation, 0);
  EXPECT_LT(plan.best[0].utilisation, 1);
  EXPECT_EQ(plan.by_scheme.size(), schemes_with_work().size());
  ASSERT_GE(plan.chosen.size(), 3u);
  EXPECT_EQ(plan.chosen.front().choice.point.step_s, plan.search.points.front().step_s);
  for (const TrainAnswer& a : plan.chosen) {
    EXPECT_FALSE(a.bound.empty()) << a.question;
    ASSERT_TRUE(a.next.has_value()) << a.question;
    EXPECT_FALSE(same_train_axes(a.choice.layout, a.next->layout)) << a.question;
    EXPECT_NE(a.next_loses_on.find('+'), std::string::npos) << a.next_loses_on;
    if (a.question.find("baseline") != std::string::npos) {
      EXPECT_TRUE(is_train_baseline(a.choice.layout));
    }
    if (a.question == "least memory") {
      EXPECT_GE(a.next->point.memory_bytes, a.choice.point.memory_bytes);
    }
  }
}

TEST(TrainPlan, ComparesSchemesByRanksAndMemory) {
  const TrainPlan& plan = small_plan();
  ASSERT_EQ(plan.by_ranks.size(), schemes_with_work().size() + 1) << "and without SP";
  ASSERT_EQ(plan.frontiers.size(), plan.by_ranks.size());
  double quickest = 1e18;
  for (const TrainFamily& family : plan.by_ranks) {
    int ranks = 0;
    for (const TrainPoint& point : family.points) {
      const TrainLayout& layout = plan.search.layout_of(point);
      EXPECT_GT(layout.sequence_ranks(), ranks) << family.family;
      EXPECT_EQ(family_of(layout), family.family);
      ranks = layout.sequence_ranks();
      quickest = std::min(quickest, point.step_s);
    }
    EXPECT_EQ(family.baseline, is_train_baseline(plan.search.layout_of(family.points.front())));
  }
  EXPECT_EQ(quickest, plan.search.points.front().step_s);
  for (const TrainFamily& family : plan.frontiers) {
    for (std::size_t i = 1; i < family.points.size(); ++i) {
      EXPECT_GE(family.points[i].step_s, family.points[i - 1].step_s);
      EXPECT_LT(family.points[i].memory_bytes, family.points[i - 1].memory_bytes);
    }
  }
}

TEST(TrainPlan, IntervalsHoldTheirBase) {
  const TrainPlan& plan = small_plan();
  ASSERT_TRUE(plan.sensitivity.has_value());
  const TrainSensitivity& s = *plan.sensitivity;
  EXPECT_EQ(s.step_s.base, plan.search.points.front().step_s);
  ASSERT_FALSE(s.ours.empty());
  EXPECT_EQ(s.behind.size(), plan.by_ranks.size());
  std::vector<Interval> intervals = {s.step_s, s.ratio};
  for (const TrainBehind& b : s.behind) intervals.push_back(b.times);
  for (const Interval& i : intervals) {
    EXPECT_LE(i.lowest, i.base);
    EXPECT_GE(i.highest, i.base);
    EXPECT_GT(i.lowest, 0);
  }
  EXPECT_EQ(s.behind.front().times.base, 1);
  double before = 1e18;
  for (const TrainRange& row : s.rows) {
    ASSERT_EQ(row.ends.size(), 2u);
    const double a = s.ratio_at(row.ends[0]), b = s.ratio_at(row.ends[1]), spread = std::max(a, b) / std::min(a, b);
    EXPECT_LE(spread, before) << "what matters most comes first";
    before = spread;
  }
  EXPECT_LT(s.step_s.lowest, s.step_s.highest);
}

TEST(TrainPlan, EveryEndIsPricedAsIfAlone) {
  // What the study shares between ends and layouts changes nothing.
  const TrainPlan& plan = small_plan();
  const TrainSensitivity& s = *plan.sensitivity;
  std::vector<const TrainEnd*> ends = {&s.described, &s.roofline};
  for (const TrainRange& row : s.rows) {
    for (const TrainEnd& end : row.ends) ends.push_back(&end);
  }
  for (const TrainEnd* end : ends) {
    const Hardware hardware = with_assumptions(plan.options.hardware, end->assumptions);
    std::map<std::string, double> quickest;
    for (const TrainPoint& point : plan.search.points) {
      const TrainLayout& layout = plan.search.layout_of(point);
      const double step_s = train_step_time(plan.options.problem, hardware, layout).total();
      const auto [best, first] = quickest.try_emplace(family_of(layout), step_s);
      if (!first) best->second = std::min(best->second, step_s);
    }
    EXPECT_EQ(quickest, end->step_s) << end->value;
  }
}

TEST(TrainPlan, UtilisationCountsNothingTwice) {
  // Llama 3.1 405B: six FLOPs a weight that a token meets, and 6·h·(128 + 128) a pair of query and key.
  const TrainProblem dense{.config = load_model_config("llama-3.1-405b"), .seq = 8192, .batch = 8};
  const Hardware h100 = load_hardware("h100");
  const double tokens = 8.0 * 8192, matrices = 405853388800.0 - 128256.0 * 16384 - (2 * 126 + 1) * 16384.0;
  const double pairs = 8.0 * 8192 * 8193 / 2;
  const double flops = 6 * tokens * matrices + 126 * 6 * 128 * pairs * 256;
  const TrainLayout layout{.scheme = "explicit", .dp = 8, .recompute = TrainRecompute::all};
  const double utilisation = model_flops_utilisation(dense, h100, layout, 100);
  EXPECT_NEAR(utilisation / (flops / (100 * 8 * 989e12)), 1, 1e-3);  // norms and RoPE beside
}

TEST(TrainPlan, JsonHasWhatThePageNeeds) {
  const nlohmann::json json = to_json(small_plan());
  EXPECT_TRUE(json.at("best")[0].at("attention_block").at("saved_bytes").is_number());
  EXPECT_EQ(json.at("by_ranks").size(), small_plan().by_ranks.size());
  EXPECT_TRUE(json.at("ratio").at("under")[0].at("ratio").is_number());
  const nlohmann::json& chosen = json.at("chosen")[0];
  EXPECT_TRUE(chosen.at("next").at("loses_on").is_string());
  EXPECT_TRUE(chosen.at("operations")[0].at("bound").is_string());
  bool priced = false, held = false;
  for (const nlohmann::json& part : chosen.at("time")) {
    (part.at("priced_not_executed").get<bool>() ? priced : held) = true;
  }
  EXPECT_TRUE(priced && held);
}

TEST(TrainPlan, PlansGroupedQueryAttention) {
  TrainPlanOptions options{
      .problem = problem(), .hardware = load_hardware("h100"), .devices = 512, .sensitivity = false};
  options.problem.config = load_model_config("llama-3.1-405b");
  const TrainPlan plan = plan_train(options);
  ASSERT_GE(plan.best.size(), 2u);
  EXPECT_GT(plan.best[0].utilisation, 0.1);
  EXPECT_LT(plan.best[0].utilisation, 1);
  // h 128 of 128, 8 KV heads: q, k, v and o of 7/8 of the own 2048 tokens, forward and backward alike.
  const TrainAttention block = train_attention(options.problem, {.scheme = "explicit", .sp = 8});
  EXPECT_EQ(block.sent.forward, 2048LL * 7 / 8 * (2 * 128 + 2 * 8) * 128 * 2);
  EXPECT_EQ(why_unfit({.scheme = "explicit", .tp = 16}, options.problem.config, 16384, 64), TrainUnfit::heads);
}

TEST(TrainPlan, ClaimsNoRatioWhereAllAreBaselines) {
  TrainPlanOptions options{.problem = problem(1024), .hardware = load_hardware("h100"), .devices = 2};
  options.problem.config = load_model_config("smollm2-135m");
  const TrainPlan plan = plan_train(options);
  ASSERT_TRUE(plan.sensitivity.has_value());
  EXPECT_TRUE(plan.sensitivity->ours.empty());
  EXPECT_LT(plan.sensitivity->step_s.lowest, plan.sensitivity->step_s.base);
  EXPECT_FALSE(to_json(plan).at("sensitivity").contains("ratio"));
}

TEST(TrainLayoutText, IsWhatTheExecutorTakes) {
  const TrainLayout layout{
      .scheme = "laga,kv=rebuild,ring", .sp = 4, .groups = 2, .dp = 2, .recompute = TrainRecompute::attention};
  EXPECT_EQ(to_string(sequence_part(layout)), to_string(parse_layout("laga:4,kv=rebuild,ring:2,recompute=attention")));
  EXPECT_EQ(layout.devices(), 16);
  EXPECT_FALSE(layout.priced_not_executed());
}

TEST(TrainPlan, RefusesWithTheNearest) {
  const auto complaint = [](TrainPlanOptions options) -> std::string {
    try {
      plan_train(std::move(options));
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  const std::string memory = complaint({.problem = problem(), .hardware = load_hardware("h100"), .devices = 8});
  EXPECT_NE(memory.find("memory binds"), std::string::npos) << memory;
  EXPECT_NE(memory.find("zero=3"), std::string::npos) << memory;
  const auto give = memory.find("give it ");
  ASSERT_NE(give, std::string::npos) << memory;
  const int enough = std::stoi(memory.substr(give + 8));
  EXPECT_EQ(
      complaint({.problem = problem(), .hardware = load_hardware("h100"), .devices = enough, .sensitivity = false}),
      "");
  EXPECT_NE(complaint({.problem = problem(), .hardware = load_hardware("h100"), .devices = enough / 2}), "");
  TrainPlanOptions seven{.problem = problem(), .hardware = load_hardware("h100"), .devices = 7};
  seven.problem.config = load_model_config("deepseek-v2-lite");
  const std::string batch = complaint(seven);
  EXPECT_NE(batch.find("the nearest that divides: 63 sequences"), std::string::npos) << batch;
  seven.problem.batch = 70;
  EXPECT_EQ(complaint(seven).find("no layout"), std::string::npos) << "what it names divides";
}

}  // namespace
}  // namespace isomer
