// isomer plan block: what one attention block takes under given layouts, forward and backward, on described hardware;
// the priced side of `isomer compare`.
#include <nlohmann/json.hpp>

#include "apps/isomer/output_file.h"
#include "apps/isomer/plan_search_commands.h"
#include "apps/isomer/table.h"
#include "apps/isomer/units.h"
#include "core/error.h"
#include "parallel/sequence/scheme.h"
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

/// The scheme without sizes and options of recomputation, its text kept by the caller.
TrainLayout train_layout_of(const Layout& given, std::string& scheme) {
  const std::string recompute = given.option("recompute", "none");
  Layout pattern = given;
  for (LayoutAxis& axis : pattern.axes) {
    axis.size = 0;
    axis.options.erase("recompute");
  }
  scheme = to_string(pattern);
  TrainLayout layout{.scheme = scheme, .sp = std::max(1, given.axes.front().size)};
  if (given.axes.size() > 1) layout.groups = std::max(1, given.axes[1].size);
  if (recompute == "attention") layout.recompute = TrainRecompute::attention;
  if (recompute == "block") layout.recompute = TrainRecompute::block;
  return layout;
}

nlohmann::json price(const TrainProblem& problem, const Hardware& hardware, const Layout& given, Table& table) {
  const int ranks = sequence_ranks_of(given);
  if (const auto why = why_unfit(given, problem.config, ranks, problem.seq); !why.empty()) {
    invalid_argument("--schemes: {}: {}", to_string(given), why);
  }
  if (data_ranks_of(given) > 1) invalid_argument("--schemes: {}: leave dp out", to_string(given));
  std::string scheme;
  const TrainLayout layout = train_layout_of(given, scheme);
  const TrainTime time = attention_block_time(problem, hardware, layout);
  table.add({to_string(given), format_seconds(time.total()), format_seconds(time.core),
             format_seconds(time.projections), format_seconds(time.sp_links), format_seconds(time.recompute)});
  return {{"layout", to_string(given)},        {"seconds", time.total()},  {"core_s", time.core},
          {"projections_s", time.projections}, {"links_s", time.sp_links}, {"recompute_s", time.recompute}};
}

void run_block_plan(const BlockArguments& a) {
  check_output_file("--json", a.json_file);
  const Hardware hardware = load_hardware(a.hardware);
  TrainProblem problem{.config = load_model_config(a.model), .seq = parse_count("--seq", a.seq, 1, kMaxSeq)};
  if (a.dtype == "f32") {
    problem.activations = DType::f32;
    problem.compute = Precision::f32;
  }
  Table table({"layout", "a block", "attention", "projections", "links", "recomputation"});
  auto blocks = nlohmann::json::array();
  for (const Layout& layout : parse_layouts(a.schemes)) blocks.push_back(price(problem, hardware, layout, table));
  fmt::print("{} on {}: one attention block, {} tokens, {}, forward and backward; nothing overlaps\n{}",
             problem.config.name, hardware.name, problem.seq, a.dtype, table.text());
  if (a.json_file.empty()) return;
  nlohmann::json json = machine_json(1, 0);
  json.update({{"command", "plan block"},
               {"model", problem.config.name},
               {"hardware", hardware.name},
               {"seq", problem.seq},
               {"dtype", a.dtype},
               {"blocks", blocks}});
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
