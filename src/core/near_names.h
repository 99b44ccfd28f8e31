// What someone may have meant by a name that does not exist.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace isomer {

/// At most three of `names`: those at most a third of their letters away, or that begin like the wanted one, letter
/// case aside; nearest first.
std::vector<std::string> near_names(std::string_view wanted, const std::vector<std::string>& names);

}  // namespace isomer
