#include "plan/hardware_json.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"
#include "model/config_reader.h"
#include "model/json_text.h"

namespace isomer {

namespace {

using nlohmann::json;

constexpr std::int64_t kMaxDevices = 1 << 20;
constexpr std::size_t kMaxTiers = 8, kMaxFigures = 64, kMaxCurves = 256;

/// A misspelt key would otherwise be ignored without a word.
void check_keys(const json& object, const std::string& where, const std::set<std::string>& known) {
  for (const auto& item : object.items()) {
    if (known.contains(item.key())) continue;
    std::string names;
    for (const auto& name : known) names += (names.empty() ? "" : ", ") + name;
    throw Error(fmt::format("{}: {}: unknown key; known are {}", where, printable(item.key()), names));
  }
}

const json& list(const ConfigReader& reader, const char* key, std::size_t at_least, std::size_t at_most) {
  const json& items = reader.value(key);
  if (!items.is_array() || items.size() < at_least || items.size() > at_most) {
    reader.wrong(key, fmt::format("a list of {} to {} entries", at_least, at_most));
  }
  return items;
}

void read_memory(const json& object, const std::string& where, Hardware& hardware) {
  const ConfigReader reader(object, where + ": memory");
  check_keys(object, reader.where(), {"bandwidth_bytes_per_s", "capacity_bytes"});
  hardware.memory_bandwidth_bytes_per_s = reader.number("bandwidth_bytes_per_s", 1e8, 1e15);
  hardware.memory_capacity_bytes = reader.number("capacity_bytes", 1e6, 1e15);
}

void read_rates(const json& object, const std::string& where, Hardware& hardware) {
  const ConfigReader reader(object, where + ": flops_per_s");
  check_keys(object, reader.where(), {"f32", "bf16", "fp8", "nvfp4"});
  hardware.flops_per_s[0] = reader.number("f32", 1e8, 1e19);
  static constexpr const char* kOthers[] = {"bf16", "fp8", "nvfp4"};
  for (std::size_t i = 0; i < 3; ++i) {
    if (reader.has(kOthers[i])) hardware.flops_per_s[i + 1] = reader.number(kOthers[i], 1e8, 1e19);
  }
}

LinkTier read_tier(const json& object, const std::string& where) {
  const ConfigReader reader(object, where);
  check_keys(object, where, {"name", "devices", "latency_s", "bandwidth_bytes_per_s"});
  return {.name = reader.plain_text("name"),
          .devices = static_cast<int>(reader.integer("devices", 2, kMaxDevices)),
          .latency_s = reader.number("latency_s", 0, 1),
          .bandwidth_bytes_per_s = reader.number("bandwidth_bytes_per_s", 1e6, 1e14)};
}

void read_tiers(const ConfigReader& reader, Hardware& hardware) {
  for (const json& object : list(reader, "links", 0, kMaxTiers)) {
    LinkTier tier = read_tier(object, fmt::format("{}: links[{}]", reader.where(), hardware.tiers.size()));
    if (!hardware.tiers.empty() && tier.devices <= hardware.tiers.back().devices) {
      throw Error(fmt::format("{}: links[{}]: devices = {}: expected more than the {} of the tier before it",
                              reader.where(), hardware.tiers.size(), tier.devices, hardware.tiers.back().devices));
    }
    hardware.tiers.push_back(std::move(tier));
  }
}

void read_figures(const ConfigReader& reader, Hardware& hardware) {
  if (!reader.has("figures")) return;
  for (const json& object : list(reader, "figures", 0, kMaxFigures)) {
    const ConfigReader figure(object, reader.where() + ": figures");
    check_keys(object, figure.where(), {"figure", "source", "doubt"});
    hardware.sources.push_back(figure.plain_text("figure") + ": " + figure.plain_text("source"));
    const std::string doubt = figure.plain_text_or("doubt", "");
    if (!doubt.empty()) hardware.doubts.push_back(figure.plain_text("figure") + ": " + doubt);
  }
}

/// Collectives that were measured on fewer devices than the first tier reaches are extrapolated there.
void add_reach_doubts(const std::vector<Curve>& curves, Hardware& hardware) {
  std::map<OperationKind, int> reach;
  for (const Curve& curve : curves) {
    if (curve.priced && is_collective(curve.kind)) reach[curve.kind] = std::max(reach[curve.kind], curve.max_devices);
  }
  for (const auto& [kind, devices] : reach) {
    if (devices == 0 || hardware.tiers.empty() || devices >= hardware.tiers.front().devices) continue;
    hardware.doubts.push_back(fmt::format("{}: measured on up to {} devices, extrapolated to {}", name_of(kind),
                                          devices, hardware.tiers.front().devices));
  }
}

std::vector<Curve> read_curves(const ConfigReader& reader) {
  std::vector<Curve> curves;
  if (!reader.has("curves")) return curves;
  for (const json& object : list(reader, "curves", 0, kMaxCurves)) {
    curves.push_back(parse_curve(object, fmt::format("{}: curves[{}]", reader.where(), curves.size())));
  }
  return curves;
}

}  // namespace

Hardware parse_hardware(const json& object, const std::string& where) {
  const ConfigReader reader(object, where);
  check_keys(object, where,
             {"schema_version", "name", "description", "memory", "flops_per_s", "links", "figures", "fit", "curves",
              "curves_from"});
  reader.integer("schema_version", kHardwareSchemaVersion, kHardwareSchemaVersion);
  Hardware hardware;
  hardware.name = reader.plain_text("name");
  constexpr std::size_t kMaxName = 100;
  if (hardware.name.empty() || hardware.name.size() > kMaxName) {
    reader.wrong("name", fmt::format("1 to {} bytes of text", kMaxName));
  }
  hardware.description = reader.plain_text_or("description", "");
  read_memory(reader.value("memory"), where, hardware);
  read_rates(reader.value("flops_per_s"), where, hardware);
  read_tiers(reader, hardware);
  read_figures(reader, hardware);
  std::vector<Curve> curves = read_curves(reader);
  hardware.fitted = !curves.empty();
  add_reach_doubts(curves, hardware);
  if (reader.has("curves_from")) {
    const std::string from = reader.plain_text("curves_from");
    if (!curves.empty()) reader.wrong("curves_from", "nothing, since there are curves of its own");
    hardware.curves = borrowed_curves(from, where);
    hardware.curves_from = from;
    hardware.doubts.push_back("curves: those of " + from + ", relative to this device's peaks; not measured here");
  } else {
    hardware.curves = std::make_shared<const CurveSet>(std::move(curves));
  }
  return hardware;
}

json with_curves(const json& description, const std::vector<Curve>& curves, const json& fit) {
  json result = description;
  result["fit"] = fit;
  result["curves"] = json::array();
  for (const Curve& curve : curves) result["curves"].push_back(curve_json(curve));
  return result;
}

}  // namespace isomer
