#include "model/text.h"

// The assembler reads the file (ISOMER_DEFAULT_TEXT, set by CMake), so that the compiler need not parse it.
asm(".pushsection .rodata\n"
    "isomer_default_text_begin:\n"
    ".incbin \"" ISOMER_DEFAULT_TEXT
    "\"\n"
    "isomer_default_text_end:\n"
    ".popsection\n"
    ".globl isomer_default_text_begin, isomer_default_text_end\n"
    ".hidden isomer_default_text_begin, isomer_default_text_end\n");

extern "C" {
[[gnu::visibility("hidden")]] extern const char isomer_default_text_begin[];
[[gnu::visibility("hidden")]] extern const char isomer_default_text_end[];
}

namespace isomer {

std::string_view default_text() {
  return {isomer_default_text_begin, static_cast<std::size_t>(isomer_default_text_end - isomer_default_text_begin)};
}

}  // namespace isomer
