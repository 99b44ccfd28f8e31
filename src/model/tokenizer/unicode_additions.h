// Characters that came after Unicode 14, which Debian 12's PCRE2 knows; the reference's patterns know Unicode 16.
#pragma once

#include <string_view>

namespace isomer {

/// What Unicode 15 and 16 added to a general category of two letters ("Lo"), a script ("Han") or the reference's word
/// characters ("\\w"), as ranges for the inside of a PCRE2 class; empty for none.
std::string_view unicode_additions(std::string_view name);

}  // namespace isomer
