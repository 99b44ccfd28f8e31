// What the program says of a command line that it doesn't understand.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>

namespace isomer {

/// What others wrote may stand in a message: a terminal must not obey it. Lines stay lines.
std::string without_controls(std::string_view text);

/// One line, as for every other error: what is wrong, the near names of a subcommand or option that there isn't, and
/// where the names are listed. For CLI::App::failure_message.
std::string usage_error_line(const CLI::App* app, const CLI::Error& error);

}  // namespace isomer
