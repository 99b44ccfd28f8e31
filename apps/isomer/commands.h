// The subcommands, one file each. Each add_… registers its subcommand; when it was chosen it leaves the process's exit
// status in `exit_code`. Errors are thrown and printed in main.
#pragma once

#include <CLI/CLI.hpp>

namespace isomer {

/// The command line as it was given; a subcommand may start itself again under mpirun.
struct CommandLine {
  int argc;
  char** argv;
};

void add_compare(CLI::App& app, const CommandLine& command_line, int& exit_code);
void add_claims(CLI::App& app, int& exit_code);
void add_convert(CLI::App& app, int& exit_code);
void add_eval(CLI::App& app, const CommandLine& command_line, int& exit_code);
void add_generate(CLI::App& app, const CommandLine& command_line, int& exit_code);
void add_inspect(CLI::App& app, int& exit_code);
void add_tokenizer(CLI::App& app, int& exit_code);
void add_train(CLI::App& app, const CommandLine& command_line, int& exit_code);
void add_plan(CLI::App& app, int& exit_code);
void add_probe(CLI::App& app, int& exit_code);

}  // namespace isomer
