#include "convert/staged_directory.h"

#include <unistd.h>

#include "core/error.h"

namespace isomer {

namespace fs = std::filesystem;

namespace {

/// Without a slash at its end, so that a suffix makes a sibling.
fs::path without_slash(const fs::path& path) { return path.has_filename() ? path : path.parent_path(); }

}  // namespace

void StagedDirectory::refuse_existing(const fs::path& out) {
  std::error_code code;
  if (out.empty()) invalid_argument("--out: expected a directory to make");
  if (fs::exists(fs::symlink_status(out, code))) {
    invalid_argument("--out {}: it is there already; choose another, or remove it first", out.string());
  }
}

StagedDirectory::StagedDirectory(const fs::path& out)
    : out_(without_slash(out)), path_(fmt::format("{}.part-{}", out_.string(), ::getpid())) {
  std::error_code code;
  fs::remove_all(path_, code);  // of a killed process with this number
  if (!fs::create_directories(path_, code) || code) {
    throw Error(fmt::format("{}: {}", path_.string(), code.message()));
  }
}

StagedDirectory::~StagedDirectory() {
  std::error_code code;
  if (!published_) fs::remove_all(path_, code);
}

void StagedDirectory::publish() {
  std::error_code code;
  if (fs::exists(fs::symlink_status(out_, code))) {
    throw Error(fmt::format("{}: something came to stand there; nothing was written", out_.string()));
  }
  fs::rename(path_, out_, code);
  if (code) throw Error(fmt::format("{}: {}", out_.string(), code.message()));
  published_ = true;
}

}  // namespace isomer
