// isomer plan: layouts and operations on hardware that is not here.
#include "apps/isomer/commands.h"
#include "apps/isomer/plan_commands.h"
#include "apps/isomer/plan_search_commands.h"

namespace isomer {

void add_plan(CLI::App& app, int& exit_code) {
  auto* plan = app.add_subcommand("plan", "prices operations and layouts on described hardware");
  plan->require_subcommand(1);
  add_plan_decode(*plan, exit_code);
  add_plan_train(*plan, exit_code);
  add_plan_block(*plan, exit_code);
  add_plan_fit(*plan, exit_code);
  add_plan_validate(*plan, exit_code);
}

}  // namespace isomer
