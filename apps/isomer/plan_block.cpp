// isomer plan block: what one attention block takes under given layouts, forward and backward, on described hardware;
// the priced side of `isomer compare`.
#include <nlohmann/json.hpp>

#include "apps/isomer/output_file.h"
#include "apps/isomer/plan_output.h"
#include "apps/isomer/plan_search_commands.h"
#include "apps/isomer/table.h"
#include "apps/isomer/units.h"
#include "core/error.h"
#include "parallel/sequence/scheme.h"
#include "plan/explain.h"
#include "plan/train_step.h"
#include "sharding/sequence_layout.h"
#include "study/machine.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxSeq = std::int64_t{1} << 30;

struct BlockArguments {
  std::string model = "deepseek-v2-lite", hardware = "h100", seq = "1024", dtype = "bf16", schemes = "explicit:2";
  std::string json_file;
};

/// What is priced of a model on some hardware, and what is said of the prices.
struct PricedBlocks {
  TrainProblem problem;
  Hardware hardware;
  Table table = Table({"layout", "a block", "attention", "projections", "links", "recomputation"});
  nlohmann::json json = nlohmann::json::array();
  std::vector<std::string> stand_ins;  // kinds of operations that no curve of this hardware was fitted to
};

/// Refuses what compare refuses (names, options and their values), what no link reaches, and what is not priced.
void check_layout(const Layout& given, const TrainProblem& problem, const Hardware& hardware) {
  make_sequence_scheme(given, problem.config);
  if (const std::string core = given.option("attention", "fused"); core != "fused") {
    invalid_argument("--schemes: {}: attention={}: only attention=fused is priced", to_string(given), core);
  }
  if (data_ranks_of(given) > 1) invalid_argument("--schemes: {}: leave dp out", to_string(given));
  std::int64_t ranks = 1;
  for (const LayoutAxis& axis : given.axes) ranks *= std::max(1, axis.size);
  check_reach(fmt::format("--schemes: {}: ", to_string(given)), ranks, hardware);
  if (const auto why = why_unfit(given, problem.config, static_cast<int>(ranks), problem.seq); !why.empty()) {
    invalid_argument("--schemes: {}: {}", to_string(given), why);
  }
}

/// The scheme without sizes, its text kept by the caller. What a TrainLayout says of recomputation stands there;
/// up-projection is a way to keep keys and stays in the scheme.
TrainLayout train_layout_of(const Layout& given, std::string& scheme) {
  const std::string recompute = given.option("recompute", "none");
  Layout pattern = given;
  for (LayoutAxis& axis : pattern.axes) {
    axis.size = 0;
    axis.options.erase("attention");
    if (recompute != "up-projection") axis.options.erase("recompute");
  }
  scheme = to_string(pattern);
  TrainLayout layout{.scheme = scheme, .sp = std::max(1, given.axes.front().size)};
  if (given.axes.size() > 1) layout.groups = std::max(1, given.axes[1].size);
  if (recompute == "attention") layout.recompute = TrainRecompute::attention;
  if (recompute == "block") layout.recompute = TrainRecompute::block;
  return layout;
}

void price(const Layout& given, PricedBlocks& priced) {
  check_layout(given, priced.problem, priced.hardware);
  std::string scheme;
  const TrainLayout layout = train_layout_of(given, scheme);
  std::vector<PricedOperation> operations;
  const TrainTime time = attention_block_time(priced.problem, priced.hardware, layout, &operations);
  add_stand_ins(priced.hardware, operations, priced.stand_ins);
  priced.table.add({to_string(given), format_seconds(time.total()), format_seconds(time.core),
                    format_seconds(time.projections), format_seconds(time.sp_links), format_seconds(time.recompute)});
  priced.json.push_back({{"layout", to_string(given)},
                         {"seconds", time.total()},
                         {"core_s", time.core},
                         {"projections_s", time.projections},
                         {"links_s", time.sp_links},
                         {"recompute_s", time.recompute}});
}

void run_block_plan(const BlockArguments& a) {
  check_output_file("--json", a.json_file);
  Hardware hardware = load_hardware(a.hardware);
  TrainProblem problem;
  problem.config = load_model_config(a.model);
  problem.seq = parse_count("--seq", a.seq, 1, kMaxSeq);
  if (a.dtype == "f32") {
    problem.activations = DType::f32;
    problem.compute = Precision::f32;
  }
  PricedBlocks priced{.problem = problem, .hardware = std::move(hardware)};
  for (const Layout& layout : parse_layouts(a.schemes)) price(layout, priced);
  fmt::print("{} on {}: one attention block, {} tokens, {}, forward and backward; nothing overlaps\n  {}\n{}{}",
             problem.config.name, priced.hardware.name, problem.seq, a.dtype,
             efficiency_text(priced.hardware, false, priced.stand_ins), positions_note(problem.config, problem.seq),
             priced.table.text());
  if (a.json_file.empty()) return;
  nlohmann::json json = machine_json(1, 0);
  json.update({{"command", "plan block"},
               {"model", problem.config.name},
               {"hardware", priced.hardware.name},
               {"hardware_fitted", priced.hardware.fitted},
               {"not_fitted", priced.stand_ins},
               {"curves_from", priced.hardware.curves_from},
               {"seq", problem.seq},
               {"dtype", a.dtype},
               {"blocks", priced.json}});
  write_output_file("--json", a.json_file, json);
}

}  // namespace

void add_plan_block(CLI::App& plan, int& exit_code) {
  CLI::App* command = plan.add_subcommand("block", "one attention block under given layouts");
  auto a = std::make_shared<BlockArguments>();
  command->add_option("--model", a->model, "a built-in name, a checkpoint's directory, or a config.json")
      ->capture_default_str();
  command->add_option("--hardware", a->hardware, "a built-in name or a hardware file")->capture_default_str();
  command->add_option("--seq", a->seq, "tokens of the sequence")->capture_default_str();
  command->add_option("--dtype", a->dtype, "f32 or bf16")->check(CLI::IsMember({"f32", "bf16"}))->capture_default_str();
  command->add_option("--schemes", a->schemes, "layouts with sizes, separated by semicolons")->capture_default_str();
  command->add_option("--json", a->json_file, "write the table as JSON");
  command->callback([a, &exit_code] {
    run_block_plan(*a);
    exit_code = 0;
  });
}

}  // namespace isomer
