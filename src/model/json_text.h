// JSON from files that nobody vouches for: configurations, safetensors headers, shard indexes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace isomer {

inline constexpr int kMaxJsonDepth = 64;

/// Parses strictly: valid UTF-8, no duplicate keys, no NaN or infinity, nesting up to kMaxJsonDepth, nothing after the
/// value. Throws isomer::Error with `source` and the byte offset (`base_offset` is added to it).
nlohmann::json parse_json(std::string_view text, std::string_view source, std::int64_t base_offset = 0);

/// The whole of a text file. Throws isomer::Error if it can't be read, isn't a regular file or is larger than
/// `max_bytes`.
std::string read_text_file(const std::filesystem::path& path, std::int64_t max_bytes);

/// A JSON value for an error message: short, on one line, never nested.
std::string brief(const nlohmann::json& value);

/// A string from a file for an error message: control characters and bytes that aren't UTF-8 escaped, cut at `limit`.
std::string printable(std::string_view text, std::size_t limit = 80);

}  // namespace isomer
