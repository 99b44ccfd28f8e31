// Against the published tables, where they are: ISOMER_SILICON_DIR, or ../shared/data/silicon beside the repository.
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "plan/curves.h"
#include "plan/fit_report.h"
#include "plan/hardware_json.h"
#include "plan/samples.h"

namespace isomer {
namespace {

std::string silicon_directory() {
  if (const char* given = std::getenv("ISOMER_SILICON_DIR")) return given;
  const std::filesystem::path beside = std::filesystem::path(ISOMER_SOURCE_DIR) / "../shared/data/silicon";
  return std::filesystem::is_directory(beside) ? beside.string() : "";
}

#define NEEDS_SILICON()                                     \
  if (silicon_directory().empty())                          \
  GTEST_SKIP() << "no tables of measured operations here: " \
                  "set ISOMER_SILICON_DIR, or put them into ../shared/data/silicon"

TEST(Silicon, EveryOperationIsWithinItsAimOnRowsHeldBack) {
  NEEDS_SILICON();
  for (const auto& [name, folder] : silicon_systems(silicon_directory())) {
    std::vector<std::string> without_curve;
    const auto families = validate(load_hardware(name), load_silicon(silicon_directory(), folder), 0, &without_curve);
    EXPECT_TRUE(without_curve.empty()) << name << ": " << without_curve.front();
    std::map<OperationKind, std::vector<const Validation*>> kinds;
    for (const Validation& v : families) kinds[v.kind].push_back(&v);
    EXPECT_GE(kinds.size(), 10u) << name;
    for (const auto& [kind, parts] : kinds) {
      const double aim = aimed_error(kind) > 0 ? aimed_error(kind) : 0.15;
      const Validation all = pooled("all", parts);
      EXPECT_LE(all.held_back.mean, aim) << name << " " << name_of(kind);
      EXPECT_GT(all.held_back.rows, 5) << name << " " << name_of(kind);
      // Not learnt by heart: rows that were not seen are nearly as good as those that were.
      EXPECT_LE(all.held_back.mean, 2 * all.used.mean + 0.03) << name << " " << name_of(kind);
    }
  }
}

TEST(Silicon, TheCommittedCurvesAreThoseOfTheCommittedProgram) {
  NEEDS_SILICON();
  for (const auto& [name, folder] : silicon_systems(silicon_directory())) {
    const Hardware hardware = load_hardware(name);
    auto families = load_silicon(silicon_directory(), folder);
    std::erase_if(families, [](const auto& item) { return item.second.samples.size() > 2000; });  // the quick ones
    EXPECT_GE(families.size(), 10u);
    for (const Curve& curve : fit_all(hardware, families, [](const std::string&) {})) {
      const auto& all = hardware.curves->all();
      const auto found =
          std::find_if(all.begin(), all.end(), [&](const Curve& c) { return c.label() == curve.label(); });
      ASSERT_NE(found, all.end()) << curve.label();
      EXPECT_NEAR(found->held_back.mean, curve.held_back.mean, 0.01) << name << " " << curve.label();
      EXPECT_NEAR(found->launch_s / curve.launch_s, 1, 0.05) << name << " " << curve.label();
    }
  }
}

TEST(Silicon, CurvesHaveFewerCoefficientsThanHalfTheRows) {
  for (const char* name : {"gb200-nvl72", "b200", "h200"}) {
    const Hardware hardware = load_hardware(name);
    for (const Curve& curve : hardware.curves->all()) {
      std::size_t coefficients = 0;
      for (const Surface& surface : curve.surfaces) coefficients += surface.values.size();
      EXPECT_LE(coefficients, static_cast<std::size_t>(curve.used.rows + curve.held_back.rows) / 2) << curve.label();
    }
  }
}

}  // namespace
}  // namespace isomer
