// Token ids as users write them in a file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace isomer {

/// Whitespace-separated integers. Throws isomer::Error naming the file and the word: unreadable, no ids, one outside
/// [0, vocabulary), more than 2^24.
std::vector<std::int32_t> read_token_ids(const std::string& path, std::int64_t vocabulary);

}  // namespace isomer
