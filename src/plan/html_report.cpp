#include "plan/html_report.h"

#include <nlohmann/json.hpp>

#include "core/error.h"

// The assembler reads the files (paths set by CMake), so that the compiler need not parse them.
asm(".pushsection .rodata\n"
    "kIsomerChart:\n"
    ".incbin \"" ISOMER_CHART_SCRIPT
    "\"\n"
    "kIsomerPage:\n"
    ".incbin \"" ISOMER_REPORT_DIR
    "/page.html\"\n"
    "kIsomerCommon:\n"
    ".incbin \"" ISOMER_REPORT_DIR
    "/common.js\"\n"
    "kIsomerViews:\n"
    ".incbin \"" ISOMER_REPORT_DIR
    "/decode.js\"\n"
    ".incbin \"" ISOMER_REPORT_DIR
    "/train.js\"\n"
    "kIsomerViewsEnd:\n"
    ".popsection\n"
    ".globl kIsomerChart, kIsomerPage, kIsomerCommon, kIsomerViews, kIsomerViewsEnd\n"
    ".hidden kIsomerChart, kIsomerPage, kIsomerCommon, kIsomerViews, kIsomerViewsEnd\n");

extern "C" {
[[gnu::visibility("hidden")]] extern const char kIsomerChart[];
[[gnu::visibility("hidden")]] extern const char kIsomerPage[];
[[gnu::visibility("hidden")]] extern const char kIsomerCommon[];
[[gnu::visibility("hidden")]] extern const char kIsomerViews[];
[[gnu::visibility("hidden")]] extern const char kIsomerViewsEnd[];
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

std::string script_safe(std::string_view text) {
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

std::string plan_html(const nlohmann::json& plan) {
  const auto between = [](const char* begin, const char* end) {
    return std::string_view(begin, static_cast<std::size_t>(end - begin));
  };
  std::string page(between(kIsomerPage, kIsomerCommon));
  put(page, "VIEWS", between(kIsomerViews, kIsomerViewsEnd));
  put(page, "COMMON", between(kIsomerCommon, kIsomerViews));
  put(page, "CHART", between(kIsomerChart, kIsomerPage));
  // Data last: what a name in it says must not be taken for a place of the page.
  put(page, "DATA", script_safe(plan.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)));
  return page;
}

}  // namespace isomer
