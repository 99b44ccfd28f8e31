// The published tables of measured operations (AIConfigurator data set), and a user's own, as samples.
#include <filesystem>

#include "core/error.h"
#include "cost/inference_cost.h"
#include "model/json_text.h"
#include "plan/samples.h"

namespace isomer {

namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxSize = std::int64_t{1} << 40;
constexpr double kMinSeconds = 1e-9, kMaxSeconds = 1e6;

struct DtypeName {
  std::string_view text;
  Precision precision;
  std::string_view variant;
};

/// int8 moves one byte an element, as fp8 does; half two, as bf16.
constexpr DtypeName kDtypes[] = {{"bfloat16", Precision::bf16, ""}, {"half", Precision::bf16, ""},
                                 {"fp8", Precision::fp8, ""},       {"int8", Precision::fp8, ""},
                                 {"nvfp4", Precision::nvfp4, ""},   {"fp8_block", Precision::fp8, "block"}};

const DtypeName& dtype(const CsvTable& table, std::size_t row, std::string_view column) {
  const std::string_view text = table.text(row, column);
  for (const auto& known : kDtypes) {
    if (known.text == text) return known;
  }
  table.wrong(row, column, "bfloat16, half, fp8, int8, nvfp4 or fp8_block");
}

std::int64_t size(const CsvTable& table, std::size_t row, std::string_view column) {
  return table.integer(row, column, 0, kMaxSize);
}

double latency_s(const CsvTable& table, std::size_t row) {
  return table.number(row, "latency", kMinSeconds * 1e3, kMaxSeconds * 1e3) * 1e-3;  // milliseconds
}

/// Files the row under (operation's kind and precisions, variant).
void add(SampleFamilies& families, Operation op, std::string variant, double seconds, bool priced = true,
         ExpertLoad load = ExpertLoad::balanced) {
  Curve identity;
  identity.kind = op.kind;
  identity.compute = is_collective(op.kind) ? Precision::bf16 : op.compute;
  identity.storage = is_collective(op.kind) ? Precision::bf16 : op.storage;
  identity.variant = std::move(variant);
  identity.priced = priced;
  identity.load = load;
  add_sample(families, identity, std::move(op), seconds);
}

void read_gemm(const CsvTable& t, SampleFamilies& families) {
  for (std::size_t row = 0; row < t.num_rows(); ++row) {
    const DtypeName& type = dtype(t, row, "gemm_dtype");
    Operation op{.kind = OperationKind::gemm, .m = size(t, row, "m"), .n = size(t, row, "n"), .k = size(t, row, "k")};
    op.compute = op.storage = type.precision;
    add(families, std::move(op), std::string(type.variant), latency_s(t, row));
  }
}

/// `over_fp8`: what kernels over an FP8 cache multiply in; the tables name the precision of the queries as they come.
void read_decode_mla(const CsvTable& t, SampleFamilies& families, Precision over_fp8) {
  for (std::size_t row = 0; row < t.num_rows(); ++row) {
    Operation op{.kind = OperationKind::decode_mla,
                 .batch = size(t, row, "batch_size"),
                 .heads = size(t, row, "num_heads"),
                 .context = size(t, row, "isl") + size(t, row, "step"),
                 .latent = 512,
                 .rope = 64};
    op.storage = dtype(t, row, "kv_cache_dtype").precision;
    op.compute = op.storage == Precision::fp8 ? over_fp8 : dtype(t, row, "mla_dtype").precision;
    add(families, std::move(op), "", latency_s(t, row));
  }
}
void read_decode_mla_widened(const CsvTable& t, SampleFamilies& families) {
  read_decode_mla(t, families, Precision::bf16);
}
void read_decode_mla_in_fp8(const CsvTable& t, SampleFamilies& families) {
  read_decode_mla(t, families, Precision::fp8);
}

void read_decode_gqa(const CsvTable& t, SampleFamilies& families) {
  for (std::size_t row = 0; row < t.num_rows(); ++row) {
    Operation op{.kind = OperationKind::decode_gqa,
                 .batch = size(t, row, "batch_size"),
                 .heads = size(t, row, "num_heads"),
                 .kv_heads = size(t, row, "num_key_value_heads"),
                 .head_dim = size(t, row, "head_dim"),
                 .context = size(t, row, "isl") + size(t, row, "step")};
    op.compute = dtype(t, row, "attn_dtype").precision;
    op.storage = dtype(t, row, "kv_cache_dtype").precision;
    add(families, std::move(op), "", latency_s(t, row));
  }
}

void read_prefill_mla(const CsvTable& t, SampleFamilies& families) {
  for (std::size_t row = 0; row < t.num_rows(); ++row) {
    const std::int64_t heads = size(t, row, "num_heads");
    Operation op{.kind = OperationKind::prefill_mla,
                 .batch = size(t, row, "batch_size"),
                 .heads = heads,
                 .kv_heads = heads,
                 .head_dim = 192,
                 .value_dim = 128,
                 .context = size(t, row, "isl") + size(t, row, "step")};
    op.compute = dtype(t, row, "mla_dtype").precision;
    op.storage = dtype(t, row, "kv_cache_dtype").precision;
    add(families, std::move(op), "", latency_s(t, row));
  }
}

/// `pre`: q_nope·W_UK, 128 → 512; `post`: õ·W_UV, 512 → 128.
void read_bmm(const CsvTable& t, SampleFamilies& families) {
  for (std::size_t row = 0; row < t.num_rows(); ++row) {
    const bool pre = t.text(row, "op_name") == "mla_gen_pre";
    if (!pre && t.text(row, "op_name") != "mla_gen_post") t.wrong(row, "op_name", "mla_gen_pre or mla_gen_post");
    Operation op{.kind = OperationKind::mla_bmm,
                 .m = size(t, row, "num_tokens"),
                 .n = pre ? 512 : 128,
                 .k = pre ? 128 : 512,
                 .heads = size(t, row, "num_heads")};
    op.compute = op.storage = dtype(t, row, "bmm_dtype").precision;
    add(families, std::move(op), "", latency_s(t, row));
  }
}

ExpertLoad expert_load(const CsvTable& t, std::size_t row, std::string_view column) {
  for (const auto load : {ExpertLoad::balanced, ExpertLoad::power_law_1_01, ExpertLoad::power_law_1_2}) {
    if (t.text(row, column) == name_of(load)) return load;
  }
  t.wrong(row, column, "balanced, power_law_1.01 or power_law_1.2");
}

void read_moe(const CsvTable& t, SampleFamilies& families) {
  for (std::size_t row = 0; row < t.num_rows(); ++row) {
    Operation op{.kind = OperationKind::moe,
                 .m = size(t, row, "num_tokens"),
                 .n = size(t, row, "inter_size"),
                 .k = size(t, row, "hidden_size"),
                 .experts = t.integer(row, "num_experts", 1, 1 << 20),
                 .top_k = t.integer(row, "topk", 1, 1 << 20),
                 .moe_tp = t.integer(row, "moe_tp_size", 1, 1 << 20),
                 .moe_ep = t.integer(row, "moe_ep_size", 1, 1 << 20)};
    op.compute = op.storage = dtype(t, row, "moe_dtype").precision;
    std::string kernel(t.text(row, "kernel_source"));
    if (kernel.starts_with("moe_torch_flow_")) kernel = kernel.substr(15);
    add(families, std::move(op), kernel, latency_s(t, row), true, expert_load(t, row, "distribution"));
  }
}

Operation collective(const CsvTable& t, std::size_t row, OperationKind kind, std::string_view dtype_column) {
  Operation op{.kind = kind};
  op.compute = op.storage = dtype(t, row, dtype_column).precision;
  op.bytes = static_cast<double>(size(t, row, "message_size")) * bytes_of(op.storage);  // counted in elements
  op.devices = static_cast<int>(t.integer(row, "num_gpus", 2, 1 << 20));
  return op;
}

void read_nccl(const CsvTable& t, SampleFamilies& families) {
  for (std::size_t row = 0; row < t.num_rows(); ++row) {
    const std::string_view name = t.text(row, "op_name");
    OperationKind kind = OperationKind::all_reduce;
    if (name == "all_gather")
      kind = OperationKind::all_gather;
    else if (name == "reduce_scatter")
      kind = OperationKind::reduce_scatter;
    else if (name == "alltoall")
      kind = OperationKind::all_to_all;
    else if (name != "all_reduce")
      t.wrong(row, "op_name", "all_reduce, all_gather, reduce_scatter or alltoall");
    add(families, collective(t, row, kind, "nccl_dtype"), "nccl", latency_s(t, row));
  }
}

void read_custom_all_reduce(const CsvTable& t, SampleFamilies& families) {
  for (std::size_t row = 0; row < t.num_rows(); ++row) {
    add(families, collective(t, row, OperationKind::all_reduce, "allreduce_dtype"), "custom", latency_s(t, row));
  }
}

/// Each device sends its tokens to the devices of their experts: bytes are those of all copies, its own included. The
/// combine returns them in bf16, unless it says low precision.
void read_expert_exchange(const CsvTable& t, SampleFamilies& families) {
  for (std::size_t row = 0; row < t.num_rows(); ++row) {
    std::string phase(t.text(row, "op_name"));
    if (!phase.starts_with("alltoall_")) t.wrong(row, "op_name", "alltoall_prepare, alltoall_dispatch or …_combine");
    phase = phase.substr(9);
    const std::int64_t ep = t.integer(row, "moe_ep_size", 2, 1 << 20), top_k = t.integer(row, "topk", 1, 1 << 20);
    const Precision type = dtype(t, row, "moe_dtype").precision;
    Operation op{.kind = OperationKind::all_to_all, .m = size(t, row, "num_tokens"), .devices = static_cast<int>(ep)};
    op.compute = op.storage = phase == "combine" ? Precision::bf16 : type;
    const double copies = expected_devices_visited(t.integer(row, "num_experts", 1, 1 << 20), top_k, ep);
    op.bytes =
        static_cast<double>(op.m) * copies * static_cast<double>(size(t, row, "hidden_size")) * bytes_of(op.storage);
    const bool priced = phase == "dispatch" && type == Precision::bf16;
    if (phase != "combine") phase += fmt::format("_{}", name_of(type));
    add(families, std::move(op), phase, latency_s(t, row), priced);
  }
}

using Reader = void (*)(const CsvTable&, SampleFamilies&);
constexpr std::pair<const char*, Reader> kReaders[] = {
    {"gemm", read_gemm},
    {"generation_mla", read_decode_mla_widened},
    {"generation_attention", read_decode_gqa},
    {"context_mla", read_prefill_mla},
    {"mla_bmm", read_bmm},
    {"moe", read_moe},
    {"nccl", read_nccl},
    {"custom_allreduce", read_custom_all_reduce},
    {"trtllm_alltoall", read_expert_exchange},
};

/// On Blackwell rows over an FP8 cache reach 3.0 PFLOP/s, above BF16's peak: they multiply in FP8. On H200 they stay
/// at 0.74, below both peaks.
bool multiplies_mla_in_fp8(const std::string& system) { return system == "gb200" || system == "b200_sxm"; }

Reader reader_of(const std::string& table, Reader read, const std::string& system) {
  return table == "generation_mla" && multiplies_mla_in_fp8(system) ? read_decode_mla_in_fp8 : read;
}

constexpr std::pair<const char*, const char*> kSystems[] = {
    {"gb200-nvl72", "gb200"}, {"b200", "b200_sxm"}, {"h200", "h200_sxm"}};

}  // namespace

std::map<std::string, std::string> silicon_systems(const std::string& directory) {
  std::map<std::string, std::string> found;
  std::error_code code;
  for (const auto& [hardware, folder] : kSystems) {
    if (fs::is_directory(fs::path(directory) / folder, code)) found.emplace(hardware, folder);
  }
  if (found.empty()) {
    throw Error(fmt::format("{}: holds none of the folders gb200, b200_sxm, h200_sxm", printable(directory, 300)));
  }
  return found;
}

SampleFamilies load_silicon(const std::string& directory, const std::string& system) {
  SampleFamilies families;
  std::error_code code;
  for (const auto& [name, read] : kReaders) {
    for (const char* suffix : {".csv.gz", ".csv"}) {
      const fs::path path = fs::path(directory) / system / (std::string(name) + suffix);
      if (!fs::exists(path, code)) continue;
      reader_of(name, read, system)(CsvTable(read_maybe_gzip(path.string()), path.string()), families);
      break;
    }
  }
  if (families.empty()) {
    throw Error(fmt::format("{}: no tables of measured operations (gemm.csv.gz, generation_mla.csv.gz …)",
                            printable((fs::path(directory) / system).string(), 300)));
  }
  return families;
}

}  // namespace isomer
