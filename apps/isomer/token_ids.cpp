#include "apps/isomer/token_ids.h"

#include <charconv>
#include <fstream>

#include "core/error.h"
#include "model/tokenizer.h"

namespace isomer {

namespace {

constexpr std::int64_t kMostIds = std::int64_t{1} << 24;

}  // namespace

std::vector<std::int32_t> read_token_ids(const std::string& path, std::int64_t vocabulary) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(fmt::format("{}: can't be read", path));
  std::vector<std::int32_t> ids;
  for (std::string word; file >> word;) {
    std::int32_t id = -1;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (error != std::errc() || end != word.data() + word.size() || id < 0 || id >= vocabulary) {
      throw Error(fmt::format("{}: word {} is '{}', not a token id from 0 to {}", path, ids.size() + 1,
                              replace_invalid_utf8(word.substr(0, 40)), vocabulary - 1));
    }
    ids.push_back(id);
    if (static_cast<std::int64_t>(ids.size()) > kMostIds) {
      throw Error(fmt::format("{}: more than {} ids", path, kMostIds));
    }
  }
  if (ids.empty()) throw Error(fmt::format("{}: no token ids in it; write whitespace-separated integers", path));
  return ids;
}

}  // namespace isomer
