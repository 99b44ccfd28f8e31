#include "train/token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "core/error.h"

namespace isomer {

namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr std::array<char, 8> kMagic = {'I', 'S', 'O', 'M', 'T', 'O', 'K', 'S'};
constexpr std::uint32_t kVersion = 1;
constexpr std::int64_t kMaxVocab = std::int64_t{1} << 31;
constexpr std::int64_t kSmallVocab = 1 << 16;  // up to here an id takes two bytes

struct Header {
  std::array<char, 8> magic = kMagic;
  std::uint32_t version = kVersion;
  std::uint32_t token_bytes = 0;
  std::uint64_t vocab_size = 0;
  std::uint64_t tokenizer_hash = 0;
  std::uint64_t num_tokens = 0;
  std::uint64_t num_documents = 0;
  std::uint64_t num_text_bytes = 0;
  std::uint64_t reserved = 0;
};
static_assert(sizeof(Header) == 64);

std::uint64_t padded(std::uint64_t bytes) { return (bytes + 7) / 8 * 8; }

/// Both sides of the header against each other and the file's size, without an overflow on the way.
void check_header(const Header& header, std::uint64_t file_bytes, const std::string& path) {
  const auto refuse = [&](std::string_view field, std::uint64_t value, std::string_view expected) {
    throw Error(fmt::format("token file {}: {} is {}, expected {}", path, field, value, expected));
  };
  if (header.version != kVersion) refuse("version", header.version, fmt::format("{}", kVersion));
  if (header.token_bytes != 2 && header.token_bytes != 4) refuse("token_bytes", header.token_bytes, "2 or 4");
  const auto most = static_cast<std::uint64_t>(header.token_bytes == 2 ? kSmallVocab : kMaxVocab);
  if (header.vocab_size < 1 || header.vocab_size > most) {
    refuse("vocab_size", header.vocab_size, fmt::format("1 to {}", most));
  }
  if (header.num_tokens > file_bytes / header.token_bytes) {
    refuse("num_tokens", header.num_tokens, fmt::format("what a file of {} bytes can hold", file_bytes));
  }
  if (header.num_documents > header.num_tokens) {
    refuse("num_documents", header.num_documents, fmt::format("at most the {} tokens", header.num_tokens));
  }
  if (header.num_text_bytes > std::uint64_t{1} << 62) refuse("num_text_bytes", header.num_text_bytes, "at most 2^62");
  const std::uint64_t expected =
      sizeof(Header) + padded(header.num_tokens * header.token_bytes) + 8 * (header.num_documents + 1);
  if (file_bytes != expected) {
    throw Error(fmt::format("token file {}: {} bytes, expected {} for {} tokens in {} documents", path, file_bytes,
                            expected, header.num_tokens, header.num_documents));
  }
}

[[noreturn]] void fail_with_errno(const std::string& path, std::string_view what) {
  throw Error(fmt::format("{}: {}: {}", path, what, std::strerror(errno)));
}

/// A file mapped read-only for as long as this lives.
class Mapping {
 public:
  explicit Mapping(const std::string& path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) fail_with_errno(path, "can't be opened");
    struct stat status {};
    const bool regular = ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
    bytes_ = regular ? static_cast<std::size_t>(status.st_size) : 0;
    void* address = bytes_ > 0 ? ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, descriptor, 0) : nullptr;
    ::close(descriptor);
    if (!regular) throw Error(fmt::format("token file {}: not a regular file", path));
    if (address == MAP_FAILED) fail_with_errno(path, "can't be mapped");
    address_ = static_cast<const std::byte*>(address);
  }
  ~Mapping() {
    if (address_ != nullptr) ::munmap(const_cast<std::byte*>(address_), bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  const std::byte* data() const { return address_; }
  std::size_t bytes() const { return bytes_; }

 private:
  const std::byte* address_ = nullptr;
  std::size_t bytes_ = 0;
};

template <class Token>
std::optional<std::size_t> first_at_least(const std::byte* tokens, std::size_t count, std::uint64_t limit) {
  for (std::size_t i = 0; i < count; ++i) {
    Token token;
    std::memcpy(&token, tokens + i * sizeof(Token), sizeof(Token));
    if (token >= limit) return i;
  }
  return std::nullopt;
}

}  // namespace

struct TokenDataset::Storage {
  Header header;
  const std::byte* tokens = nullptr;
  std::vector<std::int64_t> borders;  // [num_documents + 1]
  std::vector<std::byte> owned;       // where it wasn't mapped
  std::unique_ptr<Mapping> mapping;
};

/// Collects documents in memory.
class TokenDatasetBuilder {
 public:
  TokenDatasetBuilder(std::int64_t vocab_size, std::uint64_t tokenizer_hash) : storage_(std::make_shared<Storage>()) {
    if (vocab_size < 1 || vocab_size > kMaxVocab) {
      invalid_argument("vocab_size {}: 1 to {} for a token file", vocab_size, kMaxVocab);
    }
    storage_->header.vocab_size = static_cast<std::uint64_t>(vocab_size);
    storage_->header.tokenizer_hash = tokenizer_hash;
    storage_->header.token_bytes = vocab_size <= kSmallVocab ? 2 : 4;
    storage_->borders.push_back(0);
  }

  void add(std::span<const std::int32_t> document) {
    if (document.empty()) return;
    Header& header = storage_->header;
    const std::size_t size = header.token_bytes;
    std::size_t at = storage_->owned.size();
    storage_->owned.resize(at + document.size() * size);
    for (const std::int32_t id : document) {
      if (id < 0 || static_cast<std::uint64_t>(id) >= header.vocab_size) {
        invalid_argument("token id {}: the vocabulary has {}", id, header.vocab_size);
      }
      std::memcpy(storage_->owned.data() + at, &id, size);  // little-endian: the low bytes come first
      at += size;
    }
    header.num_tokens += document.size();
    ++header.num_documents;
    storage_->borders.push_back(static_cast<std::int64_t>(header.num_tokens));
  }

  std::shared_ptr<const TokenDataset::Storage> finish(std::int64_t num_text_bytes) {
    storage_->header.num_text_bytes = static_cast<std::uint64_t>(num_text_bytes);
    storage_->tokens = storage_->owned.data();
    return std::move(storage_);
  }

 private:
  using Storage = TokenDataset::Storage;
  std::shared_ptr<Storage> storage_;
};

std::vector<std::string_view> split_documents(std::string_view text) {
  constexpr std::string_view kSeparator = "<|endoftext|>";
  std::vector<std::string_view> documents;
  std::size_t begin = 0;
  for (std::size_t at = text.find(kSeparator); at != std::string_view::npos; at = text.find(kSeparator, at + 1)) {
    std::size_t end = at + kSeparator.size();
    if (end < text.size() && text[end] == '\r') ++end;
    const bool whole_line = (at == 0 || text[at - 1] == '\n') && (end == text.size() || text[end] == '\n');
    if (!whole_line) continue;
    documents.push_back(text.substr(begin, at - begin));
    begin = std::min(end + 1, text.size());
  }
  documents.push_back(text.substr(begin));
  return documents;
}

std::string read_utf8_text(const std::filesystem::path& path, bool lossy) {
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path)) throw Error(fmt::format("text {}: can't be read", path.string()));
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (file.bad()) throw Error(fmt::format("text {}: could not be read to its end", path.string()));
  if (text.empty()) throw Error(fmt::format("text {}: it is empty", path.string()));
  const auto invalid = invalid_utf8_at(text);
  if (!invalid) return text;
  if (lossy) return replace_invalid_utf8(text);
  throw Error(
      fmt::format("text {}: byte 0x{:02x} at offset {} is not UTF-8; mend the file, or pass --lossy to have it "
                  "replaced",
                  path.string(), static_cast<unsigned char>(text[*invalid]), *invalid));
}

TokenDataset TokenDataset::from_text(const std::vector<std::filesystem::path>& paths, const Tokenizer& tokenizer,
                                     const TextOptions& options) {
  TokenDatasetBuilder builder(tokenizer.vocab_size(), tokenizer.hash());
  std::int64_t num_text_bytes = 0, done = 0, total = 0;
  for (const auto& path : paths) {
    std::error_code code;
    const auto bytes = std::filesystem::file_size(path, code);
    total += code ? 0 : static_cast<std::int64_t>(bytes);
  }
  const auto bos = tokenizer.bos_id(), eos = tokenizer.eos_id();
  for (const auto& path : paths) {
    const std::string text = read_utf8_text(path, options.lossy);
    const auto documents = options.split_at_separator ? split_documents(text) : std::vector<std::string_view>{text};
    for (const std::string_view document : documents) {
      if (options.progress) options.progress(done, total);
      done += static_cast<std::int64_t>(document.size());
      if (document.empty()) continue;
      std::vector<std::int32_t> ids = tokenizer.encode(document);
      if (bos) ids.insert(ids.begin(), *bos);
      if (eos) ids.push_back(*eos);
      builder.add(ids);
      num_text_bytes += static_cast<std::int64_t>(document.size());
    }
  }
  return TokenDataset(builder.finish(num_text_bytes));
}

TokenDataset TokenDataset::from_tokens(const std::vector<std::vector<std::int32_t>>& documents, std::int64_t vocab_size,
                                       std::uint64_t tokenizer_hash, std::int64_t num_text_bytes) {
  TokenDatasetBuilder builder(vocab_size, tokenizer_hash);
  for (const auto& document : documents) builder.add(document);
  return TokenDataset(builder.finish(num_text_bytes));
}

bool TokenDataset::is_token_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::array<char, 8> magic{};
  return file.read(magic.data(), magic.size()) && magic == kMagic;
}

TokenDataset TokenDataset::open(const std::filesystem::path& path) {
  const std::string name = path.string();
  auto storage = std::make_shared<Storage>();
  storage->mapping = std::make_unique<Mapping>(name);
  const std::byte* data = storage->mapping->data();
  const std::size_t bytes = storage->mapping->bytes();
  Header& header = storage->header;
  if (bytes < sizeof(Header)) {
    throw Error(fmt::format("token file {}: {} bytes, expected at least {}", name, bytes, sizeof(Header)));
  }
  std::memcpy(&header, data, sizeof(Header));
  if (header.magic != kMagic) throw Error(fmt::format("{}: not a token file: it doesn't begin with ISOMTOKS", name));
  check_header(header, bytes, name);
  storage->tokens = data + sizeof(Header);
  const std::byte* borders = storage->tokens + padded(header.num_tokens * header.token_bytes);
  storage->borders.resize(header.num_documents + 1);
  std::memcpy(storage->borders.data(), borders, 8 * storage->borders.size());
  const auto& b = storage->borders;
  for (std::size_t i = 1; i < b.size(); ++i) {
    if (b[i] <= b[i - 1])
      throw Error(fmt::format("token file {}: document {} ends at {}, begins at {}", name, i - 1, b[i], b[i - 1]));
  }
  if (b.front() != 0 || b.back() != static_cast<std::int64_t>(header.num_tokens)) {
    throw Error(fmt::format("token file {}: its documents are [{}, {}), expected all {} tokens", name, b.front(),
                            b.back(), header.num_tokens));
  }
  const auto wrong = header.token_bytes == 2
                         ? first_at_least<std::uint16_t>(storage->tokens, header.num_tokens, header.vocab_size)
                         : first_at_least<std::uint32_t>(storage->tokens, header.num_tokens, header.vocab_size);
  if (wrong) {
    throw Error(fmt::format("token file {}: the id of token {} is outside its vocabulary of {}", name, *wrong,
                            header.vocab_size));
  }
  return TokenDataset(std::move(storage));
}

void TokenDataset::save(const std::filesystem::path& path) const {
  const Header& header = storage_->header;
  const std::filesystem::path partial = path.string() + fmt::format(".{}.partial", ::getpid());
  std::ofstream file(partial, std::ios::binary);
  const auto write = [&](const void* data, std::size_t bytes) {
    file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  };
  const std::size_t token_bytes = header.num_tokens * header.token_bytes;
  write(&header, sizeof(header));
  write(storage_->tokens, token_bytes);
  write("\0\0\0\0\0\0\0", padded(token_bytes) - token_bytes);
  write(storage_->borders.data(), 8 * storage_->borders.size());
  file.close();
  std::error_code code;
  if (file) std::filesystem::rename(partial, path, code);
  if (file && !code) return;
  std::error_code ignored;
  std::filesystem::remove(partial, ignored);
  throw Error(fmt::format("token file {}: can't be written{}", path.string(), code ? ": " + code.message() : ""));
}

std::int64_t TokenDataset::num_tokens() const { return static_cast<std::int64_t>(storage_->header.num_tokens); }
std::int64_t TokenDataset::num_documents() const { return static_cast<std::int64_t>(storage_->header.num_documents); }
std::int64_t TokenDataset::vocab_size() const { return static_cast<std::int64_t>(storage_->header.vocab_size); }
std::uint64_t TokenDataset::tokenizer_hash() const { return storage_->header.tokenizer_hash; }
std::int64_t TokenDataset::num_text_bytes() const { return static_cast<std::int64_t>(storage_->header.num_text_bytes); }

void TokenDataset::read(std::int64_t begin, std::span<std::int32_t> out) const {
  const auto count = static_cast<std::int64_t>(out.size());
  if (begin < 0 || count > num_tokens() || begin > num_tokens() - count) {
    invalid_argument("tokens [{}, {} + {}) of {}", begin, begin, count, num_tokens());
  }
  const std::size_t size = storage_->header.token_bytes;
  const std::byte* from = storage_->tokens + static_cast<std::size_t>(begin) * size;
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::uint32_t token = 0;
    std::memcpy(&token, from + i * size, size);
    out[i] = static_cast<std::int32_t>(token);
  }
}

std::int64_t TokenDataset::document_begin(std::int64_t i) const {
  if (i < 0 || i > num_documents()) invalid_argument("document {} of {}", i, num_documents());
  return storage_->borders[static_cast<std::size_t>(i)];
}

std::int64_t TokenDataset::document_of(std::int64_t token) const {
  if (token < 0 || token >= num_tokens()) invalid_argument("token {} of {}", token, num_tokens());
  const auto& borders = storage_->borders;
  return std::upper_bound(borders.begin(), borders.end(), token) - borders.begin() - 1;
}

}  // namespace isomer
