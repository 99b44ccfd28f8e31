// Layout strings, written the same way to every subcommand:
//   layout = axis {"," axis},  axis = name [":" (int | key=value)];
// a bare key=value belongs to the axis before it; the first axis is innermost.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace isomer {

struct LayoutAxis {
  std::string name;
  int size = 0;                                // ranks; 0: not said
  std::map<std::string, std::string> options;  // key=value
};

struct Layout {
  std::vector<LayoutAxis> axes;

  const LayoutAxis& innermost() const { return axes.front(); }
  /// The option's value at the first axis that has it, innermost first, or `fallback`.
  std::string option(std::string_view key, std::string_view fallback) const;
};

/// Throws std::invalid_argument naming the text, the place and what was expected, for which `example` stands.
Layout parse_layout(std::string_view text, std::string_view example = "laga:4");
/// Layouts separated by semicolons.
std::vector<Layout> parse_layouts(std::string_view text);
/// A text without the blanks that parse_layout passes over.
std::string without_blanks(std::string_view text);
/// The canonical text; parse_layout(to_string(l)) gives l back.
std::string to_string(const Layout& layout);

}  // namespace isomer
