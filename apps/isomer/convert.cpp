// isomer convert: a checkpoint into another form.
#include "apps/isomer/convert.h"

#include "apps/isomer/commands.h"

namespace isomer {

void add_convert(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("convert", "turn a checkpoint into another form");
  command->require_subcommand(1);
  add_convert_gguf(*command, exit_code);
  add_convert_transmla(*command, exit_code);
  add_convert_tpla(*command, exit_code);
}

}  // namespace isomer
