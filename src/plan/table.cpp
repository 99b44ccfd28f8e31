// A user's own table of measured operations (docs/planner.md, "Fit and its error").
#include <fmt/ranges.h>

#include <algorithm>

#include "core/error.h"
#include "core/near_names.h"
#include "model/json_text.h"
#include "plan/samples.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxSize = std::int64_t{1} << 40;

template <class Enum>
Enum named(const CsvTable& table, std::size_t row, const char* column, int count) {
  std::string known;
  for (int i = 0; i < count; ++i) {
    const auto value = static_cast<Enum>(i);
    if (table.text(row, column) == name_of(value)) return value;
    known += fmt::format("{}{}", i == 0 ? "" : ", ", name_of(value));
  }
  table.wrong(row, column, "one of " + known);
}

std::int64_t optional(const CsvTable& table, std::size_t row, const char* column, std::int64_t absent,
                      std::int64_t most = kMaxSize) {
  if (!table.has(column) || table.text(row, column).empty()) return absent;
  return table.integer(row, column, absent, most);
}

void read_shape(const CsvTable& t, std::size_t row, Operation& op) {
  op.m = optional(t, row, "m", 0);
  op.n = optional(t, row, "n", 0);
  op.k = optional(t, row, "k", 0);
  op.batch = optional(t, row, "batch", 0);
  op.heads = optional(t, row, "heads", 0);
  op.kv_heads = optional(t, row, "kv_heads", 0);
  op.head_dim = optional(t, row, "head_dim", 0);
  op.value_dim = optional(t, row, "value_dim", 0);
  op.context = optional(t, row, "context", 0);
  op.latent = optional(t, row, "latent", 0);
  op.rope = optional(t, row, "rope", 0);
  op.experts = optional(t, row, "experts", 0, 1 << 20);
  op.top_k = optional(t, row, "top_k", 0, 1 << 20);
  op.moe_tp = optional(t, row, "moe_tp", 1, 1 << 20);
  op.moe_ep = optional(t, row, "moe_ep", 1, 1 << 20);
  op.devices = static_cast<int>(optional(t, row, "devices", 1, 1 << 20));
  if (t.has("bytes") && !t.text(row, "bytes").empty()) op.bytes = t.number(row, "bytes", 0, 1e18);
}

/// A misspelt column would leave its sizes at their defaults.
void check_columns(const CsvTable& table, const std::string& path) {
  static const std::vector<std::string> kKnown = {"operation", "compute", "storage", "load",  "variant",  "seconds",
                                                  "m",         "n",       "k",       "batch", "heads",    "kv_heads",
                                                  "head_dim",  "context", "latent",  "rope",  "experts",  "top_k",
                                                  "moe_tp",    "moe_ep",  "devices", "bytes", "value_dim"};
  for (const std::string_view column : table.columns()) {
    if (std::find(kKnown.begin(), kKnown.end(), column) != kKnown.end()) continue;
    const auto near = near_names(column, kKnown);
    throw Error(fmt::format("{}: column '{}' is unknown{}; known are {}", path, printable(column, 40),
                            near.empty() ? "" : fmt::format("; did you mean {}?", fmt::join(near, " or ")),
                            fmt::join(kKnown, ", ")));
  }
}

/// A shape without work would divide by nothing later.
void check_work(const CsvTable& t, std::size_t row, const Operation& op) {
  const bool experts_fit = op.kind != OperationKind::moe || (op.experts > 0 && op.top_k > 0 && op.top_k <= op.experts);
  const OpCost cost = experts_fit ? cost_of(op) : OpCost{};
  const bool moves = is_collective(op.kind) || op.kind == OperationKind::elementwise;
  if ((moves ? cost.bytes_read : cost.flops) > 0) return;
  t.wrong(row, "operation", "the sizes that this operation needs, all above 0, in their columns");
}

}  // namespace

SampleFamilies load_table(const std::string& path) {
  const CsvTable t(read_maybe_gzip(path), path);
  check_columns(t, path);
  SampleFamilies families;
  for (std::size_t row = 0; row < t.num_rows(); ++row) {
    Curve identity;
    identity.kind = named<OperationKind>(t, row, "operation", static_cast<int>(OperationKind::send_receive) + 1);
    identity.compute = named<Precision>(t, row, "compute", kNumPrecisions);
    const bool has_storage = t.has("storage") && !t.text(row, "storage").empty();
    identity.storage = has_storage ? named<Precision>(t, row, "storage", kNumPrecisions) : identity.compute;
    if (t.has("load") && !t.text(row, "load").empty()) identity.load = named<ExpertLoad>(t, row, "load", 3);
    if (t.has("variant")) identity.variant = printable(t.text(row, "variant"), 40);
    Operation op{.kind = identity.kind};
    op.compute = identity.compute;
    op.storage = identity.storage;
    read_shape(t, row, op);
    check_work(t, row, op);
    add_sample(families, identity, std::move(op), t.number(row, "seconds", 1e-9, 1e6),
               static_cast<std::int64_t>(row) + 1);
  }
  if (families.empty()) throw Error(fmt::format("{}: no rows below the column names", path));
  return families;
}

}  // namespace isomer
