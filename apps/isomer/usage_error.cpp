#include "apps/isomer/usage_error.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "core/near_names.h"
#include "model/json_text.h"

namespace isomer {

namespace {

/// The subcommand that was reached, and its name behind "isomer".
struct Reached {
  const CLI::App* app;
  std::string command;
};
Reached reached_by(const CLI::App* app) {
  Reached reached{app, ""};
  for (auto chosen = app->get_subcommands(); !chosen.empty(); chosen = reached.app->get_subcommands()) {
    reached.app = chosen.front();
    reached.command += " " + reached.app->get_name();
  }
  return reached;
}

std::vector<std::string> subcommand_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  return names;
}

/// Without the dashes.
std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back(name);
  }
  return names;
}

/// "; did you mean --model or --mode?", or nothing.
std::string hint(std::string_view wanted, const std::vector<std::string>& names, std::string_view dashes) {
  const auto near = near_names(wanted, names);
  std::string text;
  for (const std::string& name : near) text += fmt::format("{}{}{}", text.empty() ? "" : " or ", dashes, name);
  return text.empty() ? "" : fmt::format("; did you mean {}?", text);
}

bool is_option(std::string_view word) { return word.size() > 1 && word.front() == '-'; }

/// "there is no option '--modle'; did you mean --model?"
std::string unknown_option(std::string_view word, const CLI::App& app) {
  const std::string_view name = word.substr(0, word.find('='));
  const std::size_t dashes = std::min(name.find_first_not_of('-'), name.size());
  return fmt::format("there is no option '{}'{}", without_controls(name),
                     hint(name.substr(dashes), option_names(app), "--"));
}

std::string unknown_subcommand(std::string_view word, const Reached& reached) {
  const auto names = subcommand_names(*reached.app);
  const std::string near = hint(word, names, "");
  return fmt::format("'{}' is no subcommand{}{} there are: {}", without_controls(word),
                     reached.command.empty() ? "" : " of isomer" + reached.command, near.empty() ? ";" : near,
                     fmt::join(names, ", "));
}

/// "--json is given twice; give it once" for an option of one value; nothing where no option is repeated.
std::string repeated_option(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    if (option->count() <= 1 || option->get_items_expected_max() != 1) continue;
    if (option->get_multi_option_policy() != CLI::MultiOptionPolicy::Throw) continue;
    const std::string times = option->count() == 2 ? "twice" : fmt::format("{} times", option->count());
    return fmt::format("{} is given {}; give it once", option->get_name(), times);
  }
  return "";
}

bool is(const CLI::Error& error, CLI::ExitCodes code) { return error.get_exit_code() == static_cast<int>(code); }

std::string problem_of(const CLI::App* app, const Reached& reached, const CLI::Error& error) {
  if (is(error, CLI::ExitCodes::ArgumentMismatch)) {
    if (std::string repeated = repeated_option(*reached.app); !repeated.empty()) return repeated;
  }
  const bool has_subcommands = !reached.app->get_subcommands({}).empty();
  const auto words = app->remaining(true);
  if (is(error, CLI::ExitCodes::ExtrasError) || is(error, CLI::ExitCodes::RequiredError)) {
    if (has_subcommands && !words.empty() && !is_option(words.front())) {
      return unknown_subcommand(words.front(), reached);
    }
    const auto option = std::find_if(words.begin(), words.end(), is_option);
    if (option != words.end()) return unknown_option(*option, *reached.app);
    if (has_subcommands) {
      return fmt::format("a subcommand is required; there are: {}", fmt::join(subcommand_names(*reached.app), ", "));
    }
  }
  return without_controls(error.what());
}

}  // namespace

std::string without_controls(std::string_view text) {
  std::string safe;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    safe += printable(text.substr(0, end), std::string::npos);
    if (end < text.size()) safe += '\n';
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return safe;
}

std::string usage_error_line(const CLI::App* app, const CLI::Error& error) {
  const Reached reached = reached_by(app);
  const std::string problem = problem_of(app, reached, error);
  if (reached.command.empty()) return fmt::format("isomer: {} (isomer --help)\n", problem);
  return fmt::format("isomer: {} (isomer{} --help lists the options)\n", problem, reached.command);
}

}  // namespace isomer
