#include "model/tokenizer/tokenizer_fields.h"

#include <algorithm>

#include "core/error.h"
#include "model/json_text.h"

namespace isomer {

void Field::fail(std::string_view expected) const {
  throw Error(fmt::format("{}: {}, expected {}", place_, brief(*value_), expected));
}

std::optional<Field> Field::find(std::string_view name) const {
  if (!value_->is_object()) fail("an object");
  const auto member = value_->find(std::string(name));
  if (member == value_->end() || member->is_null()) return std::nullopt;
  return Field(*member, fmt::format("{}{}{}", place_, place_.ends_with(": ") ? "" : ".", name));
}

Field Field::at(std::string_view name) const {
  const auto found = find(name);
  if (!found) throw Error(fmt::format("{}: no '{}' in it", place_, name));
  return *found;
}

bool Field::flag(std::string_view name, bool otherwise) const {
  const auto found = find(name);
  if (!found) return otherwise;
  if (!found->json().is_boolean()) found->fail("true or false");
  return found->json().get<bool>();
}

const std::string& Field::text() const {
  if (!value_->is_string()) fail("text");
  return value_->get_ref<const std::string&>();
}

std::int64_t Field::integer(std::int64_t lowest, std::int64_t highest) const {
  const std::string range = fmt::format("a whole number from {} to {}", lowest, highest);
  if (!value_->is_number_integer()) fail(range);
  const bool huge = value_->is_number_unsigned() && value_->get<std::uint64_t>() > std::uint64_t{1} << 62;
  const auto number = value_->get<std::int64_t>();
  if (huge || number < lowest || number > highest) fail(range);
  return number;
}

std::vector<Field> Field::items() const {
  if (!value_->is_array()) fail("an array");
  std::vector<Field> items;
  items.reserve(value_->size());
  for (std::size_t i = 0; i < value_->size(); ++i) items.emplace_back((*value_)[i], fmt::format("{}[{}]", place_, i));
  return items;
}

void Field::only(std::initializer_list<std::string_view> names) const {
  if (!value_->is_object()) fail("an object");
  for (const auto& [name, value] : value_->items()) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    throw Error(fmt::format("{}: the field '{}' ({}) is not supported", place_, printable(name), brief(value)));
  }
}

void Field::unset(std::string_view name) const {
  const auto found = find(name);
  if (!found) return;
  const nlohmann::json& value = found->json();
  const bool empty = value == false || value == "" || value == 0 || (value.is_structured() && value.empty());
  if (!empty) found->fail("null: anything else is not supported");
}

}  // namespace isomer
