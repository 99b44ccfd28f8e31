// Text that comes in pieces which may end inside a character.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

#include "model/tokenizer.h"

namespace isomer {

/// Bytes of text as they come, written as soon as they are whole characters.
class TextStream {
 public:
  void write(std::string_view bytes) {
    pending_ += bytes;
    const std::size_t whole = pending_.size() - unfinished_bytes();
    put(std::string_view(pending_).substr(0, whole));
    pending_.erase(0, whole);
  }
  void finish() {
    pending_ += '\n';
    put(pending_);
    pending_.clear();
  }

 private:
  /// Bytes at the end that begin a character and don't end it.
  std::size_t unfinished_bytes() const {
    for (std::size_t back = 1; back <= 3 && back <= pending_.size(); ++back) {
      const auto byte = static_cast<unsigned char>(pending_[pending_.size() - back]);
      if ((byte & 0xc0) == 0x80) continue;
      const std::size_t length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
      return length > back ? back : 0;
    }
    return 0;
  }
  static void put(std::string_view text) {
    const std::string valid = replace_invalid_utf8(text);
    std::fwrite(valid.data(), 1, valid.size(), stdout);
    std::fflush(stdout);
  }
  std::string pending_;
};

}  // namespace isomer
