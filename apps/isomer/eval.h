// The subcommands of isomer eval, one file each.
#pragma once

#include <CLI/CLI.hpp>

namespace isomer {

void add_eval_perplexity(CLI::App& eval, int& exit_code);
void add_eval_heads(CLI::App& eval, int& exit_code);
void add_eval_kl(CLI::App& eval, int& exit_code);
void add_eval_ngram(CLI::App& eval, int& exit_code);

}  // namespace isomer
