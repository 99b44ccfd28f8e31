// isomer inspect: what is in a checkpoint, and what is wrong with it.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "apps/isomer/commands.h"
#include "apps/isomer/output_file.h"
#include "core/error.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/gguf.h"
#include "model/inventory.h"
#include "model/json_text.h"
#include "study/machine.h"

namespace isomer {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Inspection {
  std::string path;
  std::optional<ModelConfig> config;
  std::vector<TensorGroup> groups;
  Inventory inventory;
  std::int64_t bytes = 0;
};

/// The config.json beside the weights, if there is one; a GGUF file has its own.
std::optional<ModelConfig> config_beside(const fs::path& path) {
  if (is_gguf_file(path)) return load_model_config(path.string());
  const fs::path directory = fs::is_directory(path) ? path : path.parent_path();
  const fs::path file = directory / "config.json";
  if (!fs::exists(file)) return std::nullopt;
  return load_model_config(file.string());
}

Inspection inspect(const std::string& path) {
  Inspection result;
  result.path = path;
  const Checkpoint checkpoint = Checkpoint::open(path);
  result.config = config_beside(path);
  result.groups = group_tensors(checkpoint);
  for (const auto& group : result.groups) result.bytes += group.bytes;
  if (result.config) {
    result.inventory = take_inventory(checkpoint, *result.config);
  } else {
    result.inventory.notes.emplace_back("no config.json beside the weights: tensors are listed, not checked");
  }
  return result;
}

std::string shape_text(const Shape& shape) { return shape.empty() ? "scalar" : to_string(shape); }

std::string attention_text(const ModelConfig& c) {
  if (c.attention == AttentionKind::gqa) {
    return fmt::format("GQA, {} query heads, {} KV heads of {}", c.num_attention_heads, c.num_key_value_heads,
                       c.head_dim);
  }
  return fmt::format("MLA, {} heads, kv_lora_rank {}, qk_nope {}, qk_rope {}, v {}, q_lora_rank {}{}",
                     c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim,
                     c.q_lora_rank > 0 ? fmt::format("{}", c.q_lora_rank) : "none",
                     c.kv_a_layernorm ? "" : ", no kv_a_layernorm");
}

void print_config(const Inspection& i) {
  const ModelConfig& c = *i.config;
  const std::string experts =
      c.moe.n_routed_experts == 0
          ? "dense"
          : fmt::format("{} experts, {} a token, {} shared, from layer {}", c.moe.n_routed_experts,
                        c.moe.num_experts_per_tok, c.moe.n_shared_experts, c.moe.first_k_dense_replace);
  fmt::print("{} ({})\n", c.name, c.model_type);
  fmt::print("  attention   {}\n", attention_text(c));
  fmt::print("  model       {} layers, hidden {}, vocabulary {}, {}\n", c.num_hidden_layers, c.hidden_size,
             c.vocab_size, experts);
  fmt::print("  parameters  {} in the file, {} by the configuration\n", i.inventory.num_parameters, num_parameters(c));
  fmt::print("  cache       {} elements a token\n", cache_elements_per_token(c));
}

void print(const Inspection& i) {
  if (i.config) print_config(i);
  fmt::print("  bytes       {:.3f} MB\n\n", static_cast<double>(i.bytes) / 1e6);
  std::size_t width = 6;
  for (const auto& group : i.groups) width = std::max(width, printable(group.pattern, 100).size());
  fmt::print("{:<{}}  {:>6}  {:<8}  {:<18}  {:>12}\n", "tensor", width, "count", "dtype", "shape", "MB");
  for (const auto& group : i.groups) {
    fmt::print("{:<{}}  {:>6}  {:<8}  {:<18}  {:>12.3f}\n", printable(group.pattern, 100), width, group.count,
               group.dtype, shape_text(group.shape), static_cast<double>(group.bytes) / 1e6);
  }
  if (!i.inventory.notes.empty()) fmt::print("\nNotes\n");
  for (const auto& note : i.inventory.notes) fmt::print("  {}\n", printable(note, 400));
  if (!i.inventory.problems.empty()) fmt::print("\nWrong\n");
  for (const auto& problem : i.inventory.problems) fmt::print("  {}\n", printable(problem, 400));
  fmt::print("\n{}\n",
             i.inventory.problems.empty() ? "Nothing wrong." : fmt::format("{} faults.", i.inventory.problems.size()));
}

json config_json(const ModelConfig& c) {
  return {{"name", c.name},
          {"model_type", c.model_type},
          {"attention", c.attention == AttentionKind::mla ? "mla" : "gqa"},
          {"num_hidden_layers", c.num_hidden_layers},
          {"hidden_size", c.hidden_size},
          {"num_attention_heads", c.num_attention_heads},
          {"kv_lora_rank", c.kv_lora_rank},
          {"qk_rope_head_dim", c.qk_rope_head_dim},
          {"num_parameters", num_parameters(c)},
          {"num_attention_parameters", num_attention_parameters(c)},
          {"cache_elements_per_token", cache_elements_per_token(c)},
          {"softmax_scale", softmax_scale(c)}};
}

json to_json(const Inspection& i) {
  json result = machine_json(1, 0);
  result["command"] = "inspect";
  result["path"] = i.path;
  result["config"] = i.config ? config_json(*i.config) : json(nullptr);
  result["bytes"] = i.bytes;
  result["num_parameters"] = i.config ? json(i.inventory.num_parameters) : json(nullptr);
  result["tensors"] = json::array();
  for (const auto& group : i.groups) {
    result["tensors"].push_back({{"pattern", group.pattern},
                                 {"count", group.count},
                                 {"dtype", group.dtype},
                                 {"shape", group.shape},
                                 {"bytes", group.bytes}});
  }
  result["notes"] = i.inventory.notes;
  result["problems"] = i.inventory.problems;
  return result;
}

}  // namespace

void add_inspect(CLI::App& app, int& exit_code) {
  struct Options {
    std::string path, json_path;
  };
  auto options = std::make_shared<Options>();
  auto* command = app.add_subcommand("inspect", "says what is in a checkpoint, and what is wrong with it");
  command->add_option("PATH", options->path, "a checkpoint's directory, its index, a safetensors or a GGUF file")
      ->required();
  command->add_option("--json", options->json_path, "write the same as JSON to this file");
  command->callback([options, &exit_code] {
    check_output_file("--json", options->json_path);
    const Inspection inspection = inspect(options->path);
    print(inspection);
    if (!options->json_path.empty()) write_output_file("--json", options->json_path, to_json(inspection));
    exit_code = inspection.inventory.problems.empty() ? 0 : 1;
  });
}

}  // namespace isomer
