#include "model/text.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/error.h"

namespace isomer {
namespace {

[[noreturn]] void fail(const std::string& path, std::string_view reason) {
  throw Error(fmt::format("text file '{}': {}", path, reason));
}

}  // namespace

std::string load_text_bytes(const std::string& path) {
  std::error_code status_error;
  const std::filesystem::file_status status = std::filesystem::status(path, status_error);
  if (!std::filesystem::exists(status)) fail(path, status_error.message());
  if (std::filesystem::is_directory(status)) fail(path, "is a directory");
  if (!std::filesystem::is_regular_file(status)) fail(path, "not a regular file");

  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, std::strerror(errno));
  std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (file.bad()) fail(path, "could not be read to its end");
  if (bytes.empty()) fail(path, "is empty");
  return bytes;
}

std::vector<std::int64_t> byte_tokens(std::string_view text, std::size_t count, bool* wrapped) {
  if (text.empty() && count > 0)
    invalid_argument("byte_tokens: {} tokens asked of an empty text; give some text", count);
  if (wrapped) *wrapped = count > text.size();
  std::vector<std::int64_t> tokens(count);
  std::size_t at = 0;
  for (std::int64_t& token : tokens) {
    token = static_cast<unsigned char>(text[at]);
    if (++at == text.size()) at = 0;
  }
  return tokens;
}

}  // namespace isomer
