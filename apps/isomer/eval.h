// The subcommands of isomer eval, one file each.
#pragma once

#include "apps/isomer/commands.h"

namespace isomer {

void add_eval_perplexity(CLI::App& eval, int& exit_code);
void add_eval_logits(CLI::App& eval, const CommandLine& command_line, int& exit_code);
void add_eval_heads(CLI::App& eval, int& exit_code);
void add_eval_kl(CLI::App& eval, const CommandLine& command_line, int& exit_code);
void add_eval_ngram(CLI::App& eval, int& exit_code);

}  // namespace isomer
