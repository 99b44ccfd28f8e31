// The subcommands of isomer convert, one file each.
#pragma once

#include <CLI/CLI.hpp>

namespace isomer {

void add_convert_gguf(CLI::App& convert, int& exit_code);
void add_convert_transmla(CLI::App& convert, int& exit_code);
void add_convert_tpla(CLI::App& convert, int& exit_code);

}  // namespace isomer
