#include <fmt/format.h>

#include <cstdio>
#include <exception>

#include "commands.h"

int main(int argc, char** argv) {
  CLI::App app("Isomer: one attention, every sharding");
  app.require_subcommand(1);
  int exit_code = 0;
  isomer::add_inspect(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    fmt::print(stderr, "isomer: {}\n", error.what());
    return 2;
  }
  return exit_code;
}
