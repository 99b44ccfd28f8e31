// Reads one JSON object of a configuration key by key; every complaint names key, value and what was expected.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace isomer {

class ConfigReader {
 public:
  /// `where` opens every message: the model's name, or "name: rope_scaling". Throws if `object` isn't an object.
  ConfigReader(const nlohmann::json& object, std::string where);

  /// The key stands here, and not with null.
  bool has(const char* key) const;

  /// Required and optional values. null is the same as absent.
  std::int64_t integer(const char* key, std::int64_t low, std::int64_t high) const;
  std::int64_t integer_or(const char* key, std::int64_t low, std::int64_t high, std::int64_t absent) const;
  /// A finite number in [low, high]; integers are numbers too.
  double number(const char* key, double low, double high) const;
  double number_or(const char* key, double low, double high, double absent) const;
  bool boolean(const char* key) const;
  bool boolean_or(const char* key, bool absent) const;
  std::string text(const char* key) const;
  std::string text_or(const char* key, std::string absent) const;
  /// A string that is to be printed as it stands: without control characters, which a terminal would obey.
  std::string plain_text(const char* key) const;
  std::string plain_text_or(const char* key, std::string absent) const;
  /// A list of `size` finite numbers in [low, high].
  std::vector<double> numbers(const char* key, std::size_t size, double low, double high) const;
  const nlohmann::json& value(const char* key) const;

  /// Throws: "where: key = value: expected …".
  [[noreturn]] void wrong(const char* key, std::string_view expected) const;

  const std::string& where() const { return where_; }

 private:
  const nlohmann::json& object_;
  std::string where_;
};

struct ModelConfig;

/// rope_theta, rope_scaling and rope_parameters into config.rope; the head dimensions must be set already.
void read_rope(const ConfigReader& reader, ModelConfig& config);
/// The router and the experts into config.moe.
void read_moe(const ConfigReader& reader, ModelConfig& config, bool sigmoid_by_default);

}  // namespace isomer
