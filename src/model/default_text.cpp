#include "model/text.h"

// The assembler reads the file (ISOMER_DEFAULT_TEXT, set by CMake), so that the compiler need not parse it.
asm(".pushsection .rodata\n"
    "kIsomerTextBegin:\n"
    ".incbin \"" ISOMER_DEFAULT_TEXT
    "\"\n"
    "kIsomerTextEnd:\n"
    ".popsection\n"
    ".globl kIsomerTextBegin, kIsomerTextEnd\n"
    ".hidden kIsomerTextBegin, kIsomerTextEnd\n");

extern "C" {
[[gnu::visibility("hidden")]] extern const char kIsomerTextBegin[];
[[gnu::visibility("hidden")]] extern const char kIsomerTextEnd[];
}

namespace isomer {

std::string_view default_text() {
  return {kIsomerTextBegin, static_cast<std::size_t>(kIsomerTextEnd - kIsomerTextBegin)};
}

}  // namespace isomer
