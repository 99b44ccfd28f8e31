// The subcommands of `isomer plan`, one file each.
#pragma once

#include <CLI/CLI.hpp>

namespace isomer {

void add_plan_fit(CLI::App& plan, int& exit_code);
void add_plan_validate(CLI::App& plan, int& exit_code);

}  // namespace isomer
