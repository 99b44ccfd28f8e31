#include "plan/html_report.h"

#include <nlohmann/json.hpp>

#include "core/error.h"

// The assembler reads the files (paths set by CMake), so that the compiler need not parse them.
asm(".pushsection .rodata\n"
    "kIsomerChartBegin:\n"
    ".incbin \"" ISOMER_CHART_SCRIPT
    "\"\n"
    "kIsomerChartEnd:\n"
    "kIsomerPageBegin:\n"
    ".incbin \"" ISOMER_REPORT_PAGE
    "\"\n"
    "kIsomerPageEnd:\n"
    ".popsection\n"
    ".globl kIsomerChartBegin, kIsomerChartEnd, kIsomerPageBegin, kIsomerPageEnd\n"
    ".hidden kIsomerChartBegin, kIsomerChartEnd, kIsomerPageBegin, kIsomerPageEnd\n");

extern "C" {
[[gnu::visibility("hidden")]] extern const char kIsomerChartBegin[];
[[gnu::visibility("hidden")]] extern const char kIsomerChartEnd[];
[[gnu::visibility("hidden")]] extern const char kIsomerPageBegin[];
[[gnu::visibility("hidden")]] extern const char kIsomerPageEnd[];
}

namespace isomer {

namespace {

/// Puts `value` where the page says `{{key}}`, which stands in it once.
void put(std::string& page, std::string_view key, std::string_view value) {
  const std::string place = fmt::format("{{{{{}}}}}", key);
  const auto at = page.find(place);
  ISOMER_CHECK(at != std::string::npos, "the page has no {}", place);
  page.replace(at, place.size(), value);
}

}  // namespace

std::string script_safe(std::string text) {
  std::string safe;
  safe.reserve(text.size());
  for (const char c : text) {
    if (c == '<') {
      safe += "\\u003c";
    } else {
      safe += c;
    }
  }
  return safe;
}

std::string decode_html(const nlohmann::json& plan) {
  std::string page(kIsomerPageBegin, kIsomerPageEnd);
  // Data last: what a name in it says must not be taken for a place of the page.
  put(page, "CHART", {kIsomerChartBegin, static_cast<std::size_t>(kIsomerChartEnd - kIsomerChartBegin)});
  put(page, "DATA", script_safe(plan.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)));
  return page;
}

}  // namespace isomer
