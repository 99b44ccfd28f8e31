// Files that a command writes at its end.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace isomer {

/// Where a result is to be written at the end: told at the beginning if it can't be. An empty name is no file. Throws
/// std::invalid_argument.
void check_output_file(const std::string& option, const std::string& file);

/// Writes the whole or, on failure, nothing: what was there before stays until the new content is complete. Throws
/// isomer::Error.
void write_output_file(const std::string& option, const std::string& file, const std::string& text);
/// Indented; bytes of names that aren't UTF-8 are replaced.
void write_output_file(const std::string& option, const std::string& file, const nlohmann::json& json);

/// Throws std::invalid_argument where both options name the same file.
void check_different_files(const std::string& option, const std::string& file, const std::string& other_option,
                           const std::string& other);

}  // namespace isomer
