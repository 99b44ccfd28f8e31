// Curves in hardware files.
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "model/config_reader.h"
#include "model/json_text.h"
#include "plan/hardware_json.h"

namespace isomer {

namespace {

using nlohmann::json;

constexpr int kMaxKnots = 64, kMaxValues = 1 << 14, kMaxSurfaces = 16;

/// Four digits are more than a fit is good for.
double rounded(double value) { return value == 0 ? 0 : std::stod(fmt::format("{:.4g}", value)); }
double rounded_log(double value) { return std::round(value * 1000) / 1000; }

template <class Enum>
Enum enum_value(const ConfigReader& reader, const char* key, int count) {
  const std::string text = reader.text(key);
  std::string known;
  for (int i = 0; i < count; ++i) {
    const auto value = static_cast<Enum>(i);
    if (name_of(value) == text) return value;
    known += fmt::format("{}{}", i == 0 ? "" : ", ", name_of(value));
  }
  reader.wrong(key, "one of " + known);
}

Axis parse_axis(const json& object, const std::string& where, OperationKind kind) {
  const ConfigReader reader(object, where);
  const std::string name = reader.text("feature");
  const auto names = feature_names(kind);
  const auto found = std::find(names.begin(), names.end(), name);
  if (name.empty() || found == names.end()) reader.wrong("feature", fmt::format("a feature of {}", name_of(kind)));
  return {.feature = static_cast<int>(found - names.begin()),
          .first = reader.number("first", 0, 64),
          .step = reader.number("step", 0.01, 64),
          .count = static_cast<int>(reader.integer("count", 1, kMaxKnots))};
}

Surface parse_surface(const json& object, const std::string& where, OperationKind kind) {
  const ConfigReader reader(object, where);
  const json& axes = reader.value("axes");
  if (!axes.is_array() || axes.empty() || axes.size() > 3) reader.wrong("axes", "a list of 1 to 3 axes");
  Surface surface;
  for (const json& axis : axes) surface.axes.push_back(parse_axis(axis, where + ": axes", kind));
  const int size = num_values(surface.axes);
  if (size > kMaxValues) reader.wrong("axes", fmt::format("at most {} knots", kMaxValues));
  surface.values = reader.numbers("values", static_cast<std::size_t>(size), -20, 20);
  return surface;
}

ErrorSummary parse_errors(const ConfigReader& reader, const char* key) {
  if (!reader.has(key)) return {};
  const ConfigReader errors(reader.value(key), reader.where() + ": " + key);
  return {errors.integer("rows", 0, std::int64_t{1} << 40), errors.number("mean_error", 0, 1e9),
          errors.number("p95_error", 0, 1e9)};
}

json errors_json(const ErrorSummary& errors) {
  return {{"rows", errors.rows}, {"mean_error", rounded(errors.mean)}, {"p95_error", rounded(errors.p95)}};
}

json surface_json(const Surface& surface, OperationKind kind) {
  json axes = json::array();
  for (const Axis& axis : surface.axes) {
    axes.push_back({{"feature", feature_names(kind)[static_cast<std::size_t>(axis.feature)]},
                    {"first", axis.first},
                    {"step", axis.step},
                    {"count", axis.count}});
  }
  std::vector<double> values;
  for (const double value : surface.values) values.push_back(rounded_log(value));
  return {{"axes", axes}, {"values", values}};
}

}  // namespace

json curve_json(const Curve& curve) {
  json result = {{"operation", name_of(curve.kind)},
                 {"compute", name_of(curve.compute)},
                 {"storage", name_of(curve.storage)},
                 {"launch_s", rounded(curve.launch_s)},
                 {"compute_share", rounded(curve.compute_share)},
                 {"bytes_share", rounded(curve.bytes_share)},
                 {"exponent", rounded(curve.exponent)}};
  if (!curve.variant.empty()) result["variant"] = curve.variant;
  if (!curve.priced) result["priced"] = false;
  if (curve.max_devices > 0) result["max_devices"] = curve.max_devices;
  if (curve.kind == OperationKind::moe) result["load"] = name_of(curve.load);
  if (curve.per_item_s > 0) result["per_item_s"] = rounded(curve.per_item_s);
  for (const Surface& surface : curve.surfaces) result["surfaces"].push_back(surface_json(surface, curve.kind));
  if (curve.used.rows > 0) result["used"] = errors_json(curve.used);
  if (curve.held_back.rows > 0) result["held_back"] = errors_json(curve.held_back);
  return result;
}

Curve parse_curve(const json& object, const std::string& where) {
  const ConfigReader reader(object, where);
  Curve curve;
  curve.kind = enum_value<OperationKind>(reader, "operation", static_cast<int>(OperationKind::send_receive) + 1);
  curve.compute = enum_value<Precision>(reader, "compute", kNumPrecisions);
  curve.storage = enum_value<Precision>(reader, "storage", kNumPrecisions);
  if (reader.has("load")) curve.load = enum_value<ExpertLoad>(reader, "load", 3);
  curve.variant = reader.plain_text_or("variant", "");
  curve.priced = reader.boolean_or("priced", true);
  curve.max_devices = static_cast<int>(reader.integer_or("max_devices", 0, 1 << 20, 0));
  curve.launch_s = reader.number("launch_s", 0, 1);
  curve.per_item_s = reader.number_or("per_item_s", 0, 1, 0);
  curve.compute_share = reader.number("compute_share", 1e-6, 100);
  curve.bytes_share = reader.number("bytes_share", 1e-6, 100);
  curve.exponent = reader.number("exponent", 0.5, 100);
  if (reader.has("surfaces")) {
    const json& surfaces = reader.value("surfaces");
    if (!surfaces.is_array() || surfaces.size() > kMaxSurfaces) {
      reader.wrong("surfaces", fmt::format("a list of at most {}", kMaxSurfaces));
    }
    for (const json& surface : surfaces) {
      curve.surfaces.push_back(parse_surface(surface, where + ": surfaces", curve.kind));
    }
  }
  curve.used = parse_errors(reader, "used");
  curve.held_back = parse_errors(reader, "held_back");
  return curve;
}

}  // namespace isomer
