// Hardware files: JSON in, JSON out (docs/planner.md, "Hardware files").
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "plan/curves.h"
#include "plan/hardware.h"

namespace isomer {

inline constexpr int kHardwareSchemaVersion = 1;

/// Throws isomer::Error: "WHERE: key = value: expected …".
Hardware parse_hardware(const nlohmann::json& json, const std::string& where);
/// The curves of built-in hardware that has its own. Throws isomer::Error, beginning with `where`.
std::shared_ptr<const CurveSet> borrowed_curves(const std::string& from, const std::string& where);

nlohmann::json curve_json(const Curve& curve);
Curve parse_curve(const nlohmann::json& json, const std::string& where);

/// `description` (a hardware file) with its "curves" and "fit" replaced. Values are rounded to what they are good for.
nlohmann::json with_curves(const nlohmann::json& description, const std::vector<Curve>& curves,
                           const nlohmann::json& fit);

/// Text of a hardware file: one figure a line, surfaces on one line.
std::string hardware_text(const nlohmann::json& json);

}  // namespace isomer
