// The subcommands; one file each. Each adds itself to the program and sets exit_code when it has run.
#pragma once

#include <CLI/CLI.hpp>

namespace isomer {

void add_inspect(CLI::App& app, int& exit_code);

}  // namespace isomer
