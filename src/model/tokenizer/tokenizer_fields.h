// Reading of tokenizer.json's fields: each access names the field where it fails.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace isomer {

/// A value of the file with its place ("tokenizer.json: model.merges[3]").
class Field {
 public:
  Field(const nlohmann::json& value, std::string place) : value_(&value), place_(std::move(place)) {}

  const nlohmann::json& json() const { return *value_; }
  const std::string& place() const { return place_; }
  bool is_null() const { return value_->is_null(); }

  /// Throws isomer::Error: place, value, then `expected`.
  [[noreturn]] void fail(std::string_view expected) const;
  /// A member that must be there.
  Field at(std::string_view name) const;
  /// A member that may be absent or null.
  std::optional<Field> find(std::string_view name) const;
  bool flag(std::string_view name, bool otherwise) const;
  const std::string& text() const;
  std::int64_t integer(std::int64_t lowest, std::int64_t highest) const;
  std::vector<Field> items() const;
  /// Refuses members with any other name, as what they would mean is not known here.
  void only(std::initializer_list<std::string_view> names) const;
  /// Refuses a member that is there and neither null, nor false, nor "", nor 0, nor empty.
  void unset(std::string_view name) const;

 private:
  const nlohmann::json* value_;
  std::string place_;
};

}  // namespace isomer
