// The subcommands of `isomer plan` that search.
#pragma once

#include <CLI/CLI.hpp>

namespace isomer {

void add_plan_decode(CLI::App& plan, int& exit_code);
void add_plan_train(CLI::App& plan, int& exit_code);
void add_plan_block(CLI::App& plan, int& exit_code);

}  // namespace isomer
