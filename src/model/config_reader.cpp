#include "model/config_reader.h"

#include <cmath>

#include "model/json_text.h"

namespace isomer {

ConfigReader::ConfigReader(const nlohmann::json& object, std::string where)
    : object_(object), where_(std::move(where)) {
  if (!object.is_object()) throw Error(fmt::format("{}: {}: expected an object", where_, brief(object)));
}

bool ConfigReader::has(const char* key) const {
  const auto found = object_.find(key);
  return found != object_.end() && !found->is_null();
}

const nlohmann::json& ConfigReader::value(const char* key) const {
  const auto found = object_.find(key);
  if (found == object_.end()) throw Error(fmt::format("{}: {} is missing", where_, key));
  return *found;
}

void ConfigReader::wrong(const char* key, std::string_view expected) const {
  const auto found = object_.find(key);
  const std::string shown = found == object_.end() ? "absent" : brief(*found);
  throw Error(fmt::format("{}: {} = {}: expected {}", where_, key, shown, expected));
}

std::int64_t ConfigReader::integer(const char* key, std::int64_t low, std::int64_t high) const {
  const auto& found = value(key);
  const bool fits = found.is_number_unsigned()
                        ? found.get<std::uint64_t>() <= static_cast<std::uint64_t>(std::max<std::int64_t>(high, 0))
                        : found.is_number_integer();
  if (!fits || found.get<std::int64_t>() < low || found.get<std::int64_t>() > high) {
    wrong(key, fmt::format("an integer from {} to {}", low, high));
  }
  return found.get<std::int64_t>();
}

std::int64_t ConfigReader::integer_or(const char* key, std::int64_t low, std::int64_t high, std::int64_t absent) const {
  return has(key) ? integer(key, low, high) : absent;
}

double ConfigReader::number(const char* key, double low, double high) const {
  const auto& found = value(key);
  const double number = found.is_number() ? found.get<double>() : std::nan("");
  if (!(number >= low && number <= high)) wrong(key, fmt::format("a number from {:g} to {:g}", low, high));
  return number;
}

double ConfigReader::number_or(const char* key, double low, double high, double absent) const {
  return has(key) ? number(key, low, high) : absent;
}

bool ConfigReader::boolean(const char* key) const {
  if (!value(key).is_boolean()) wrong(key, "true or false");
  return value(key).get<bool>();
}

bool ConfigReader::boolean_or(const char* key, bool absent) const { return has(key) ? boolean(key) : absent; }

std::string ConfigReader::text(const char* key) const {
  if (!value(key).is_string()) wrong(key, "a string");
  return value(key).get<std::string>();
}

std::string ConfigReader::text_or(const char* key, std::string absent) const {
  return has(key) ? text(key) : std::move(absent);
}

std::string ConfigReader::plain_text(const char* key) const {
  constexpr std::size_t kMaxBytes = 4096;
  std::string found = text(key);
  if (found.size() > kMaxBytes) wrong(key, fmt::format("at most {} bytes of text", kMaxBytes));
  if (printable(found, kMaxBytes) != found) wrong(key, "text without control characters");
  return found;
}

std::string ConfigReader::plain_text_or(const char* key, std::string absent) const {
  return has(key) ? plain_text(key) : std::move(absent);
}

std::vector<double> ConfigReader::numbers(const char* key, std::size_t size, double low, double high) const {
  const auto& found = value(key);
  if (!found.is_array() || found.size() != size) wrong(key, fmt::format("an array of {} numbers", size));
  std::vector<double> result;
  for (const auto& item : found) {
    const double number = item.is_number() ? item.get<double>() : std::nan("");
    if (!(number >= low && number <= high)) {
      throw Error(fmt::format("{}: {}[{}] = {}: expected a number from {:g} to {:g}", where_, key, result.size(),
                              brief(item), low, high));
    }
    result.push_back(number);
  }
  return result;
}

}  // namespace isomer
