#include <malloc.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

#include "apps/isomer/commands.h"
#include "apps/isomer/usage_error.h"
#include "comm/group.h"

namespace {

/// Keeps freed tensors in the process: giving large blocks back and faulting them in again costs more than the kernels
/// that use them.
void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, -1);
  mallopt(M_TOP_PAD, 64 << 20);
}

}  // namespace

int main(int argc, char** argv) {
  keep_freed_memory();
  isomer::join_launcher();
  CLI::App app("Isomer: one attention, every sharding, measured on equal terms.", "isomer");
  app.set_version_flag("--version", ISOMER_VERSION);
  app.require_subcommand(1);
  app.failure_message(isomer::usage_error_line);
  int exit_code = 0;
  isomer::add_compare(app, {argc, argv}, exit_code);
  isomer::add_train(app, {argc, argv}, exit_code);
  isomer::add_eval(app, {argc, argv}, exit_code);
  isomer::add_generate(app, {argc, argv}, exit_code);
  isomer::add_convert(app, exit_code);
  isomer::add_claims(app, exit_code);
  isomer::add_inspect(app, exit_code);
  isomer::add_tokenizer(app, exit_code);
  isomer::add_plan(app, exit_code);
  isomer::add_probe(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    exit_code = app.exit(error) == 0 ? 0 : 2;  // 0: help or version was asked for
  } catch (const std::exception& error) {
    std::fprintf(stderr, "isomer: %s\n", isomer::without_controls(error.what()).c_str());
    return 2;
  }
  // A table that did not arrive is a failure, on a full disk say.
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    std::fprintf(stderr, "isomer: the output can't be written: %s\n", std::strerror(errno));
    return 2;
  }
  return exit_code;
}
