// The regular expressions of a tokenizer.json are written for Oniguruma. PCRE2 reads most of them the same way; what it
// would read otherwise is rewritten here, and what is neither the same nor rewritten is refused.
#pragma once

#include <string>
#include <string_view>

namespace isomer {

/// PCRE2's spelling of an Oniguruma pattern. Throws isomer::Error that begins with `field` and names the construct and
/// its offset.
std::string translate_pattern(std::string_view pattern, std::string_view field);

}  // namespace isomer
