// isomer eval: what a model is worth on text that it has not seen, and what simple models are.
#include "apps/isomer/eval.h"

namespace isomer {

void add_eval(CLI::App& app, const CommandLine& command_line, int& exit_code) {
  CLI::App* command = app.add_subcommand("eval", "measure a model on held-out text, and baselines beside it");
  command->require_subcommand(1);
  add_eval_perplexity(*command, exit_code);
  add_eval_logits(*command, command_line, exit_code);
  add_eval_heads(*command, exit_code);
  add_eval_kl(*command, command_line, exit_code);
  add_eval_ngram(*command, exit_code);
}

}  // namespace isomer
