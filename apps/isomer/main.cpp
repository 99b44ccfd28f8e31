#include <fmt/format.h>
#include <malloc.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

#include "apps/isomer/commands.h"
#include "comm/group.h"
#include "model/json_text.h"

namespace {

/// Keeps freed tensors in the process: giving large blocks back and faulting them in again costs more than the kernels
/// that use them.
void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, -1);
  mallopt(M_TOP_PAD, 64 << 20);
}

std::string subcommand_names(const CLI::App& app) {
  std::string names;
  for (const CLI::App* command : app.get_subcommands({})) names += (names.empty() ? "" : ", ") + command->get_name();
  return names;
}

/// What others wrote may stand in a message: a terminal must not obey it. Lines stay lines.
std::string without_controls(std::string_view text) {
  std::string safe;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    safe += isomer::printable(text.substr(0, end), std::string::npos);
    if (end < text.size()) safe += '\n';
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return safe;
}

/// One line, as for every other error.
std::string failure_line(const CLI::App* app, const CLI::Error& error) {
  std::string command;
  const CLI::App* inner = app;
  for (auto chosen = inner->get_subcommands(); !chosen.empty(); chosen = inner->get_subcommands()) {
    inner = chosen.front();
    command += " " + inner->get_name();
  }
  const std::string problem = without_controls(error.what());
  if (!command.empty()) return fmt::format("isomer: {} (isomer{} --help lists the options)\n", problem, command);
  const auto words = app->remaining();
  const std::string what =
      words.empty() ? problem : fmt::format("'{}' is no subcommand", without_controls(words.front()));
  return fmt::format("isomer: {}; there are: {} (isomer --help)\n", what, subcommand_names(*app));
}

}  // namespace

int main(int argc, char** argv) {
  keep_freed_memory();
  isomer::join_launcher();
  CLI::App app("Isomer: one attention, every sharding, measured on equal terms.", "isomer");
  app.set_version_flag("--version", ISOMER_VERSION);
  app.require_subcommand(1);
  app.failure_message(failure_line);
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
    std::fprintf(stderr, "isomer: %s\n", without_controls(error.what()).c_str());
    return 2;
  }
  // A table that did not arrive is a failure, on a full disk say.
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    std::fprintf(stderr, "isomer: the output can't be written: %s\n", std::strerror(errno));
    return 2;
  }
  return exit_code;
}
