#include "cost/decode_bytes.h"

#include "core/error.h"
#include "sharding/tokens.h"

namespace isomer {

namespace {

double real(std::int64_t value) { return static_cast<double>(value); }

/// Of `total` elements dealt over `parts`, those of part `index`.
double part_of(std::int64_t total, int parts, int index) { return real(balanced_part(total, parts, index).count); }

/// An all-reduce as reduce-scatter and all-gather: (x − x_p) + (N−1)·x_p.
DecodeTransfer all_reduce(std::string_view name, std::int64_t elements, int devices, int device) {
  const double mine = part_of(elements, devices, device);
  return {.name = name,
          .collective = DecodeCollective::all_reduce,
          .devices = devices,
          .sent = (real(elements) - mine) + (devices - 1) * mine,
          .buffer = real(elements)};
}

DecodeTransfer at(DecodeStage stage, DecodeTransfer transfer) {
  transfer.stage = stage;
  return transfer;
}

DecodeTransfer in_float32(DecodeTransfer transfer) {
  transfer.sent_f32 = transfer.sent;
  transfer.buffer_f32 = transfer.buffer;
  transfer.sent = transfer.buffer = 0;
  return transfer;
}

/// An all-gather of shares, in elements; `mine` is this device's.
DecodeTransfer all_gather(std::string_view name, double whole, double mine, int devices) {
  return {.name = name,
          .collective = DecodeCollective::all_gather,
          .devices = devices,
          .sent = (devices - 1) * mine,
          .buffer = whole};
}

DecodeTransfer reduce_scatter(std::string_view name, double whole, double mine, int devices) {
  return {.name = name,
          .collective = DecodeCollective::reduce_scatter,
          .devices = devices,
          .sent = whole - mine,
          .buffer = whole};
}

/// What one step knows of its attention group.
struct Step {
  const ModelConfig& config;
  const DecodeShards& shards;
  std::int64_t batch, context;
  int device;

  bool mla() const { return config.attention == AttentionKind::mla; }
  int slice() const { return device / shards.tpa; }
  int column() const { return device % shards.tpa; }
  std::int64_t hidden() const { return batch * config.hidden_size; }
  std::int64_t column_heads() const {
    const std::int64_t kv = mla() ? config.num_attention_heads : config.num_key_value_heads;
    return grouped_heads(config.num_attention_heads, kv, shards.tpa, column()).query.count;
  }
  double own_heads() const { return part_of(column_heads(), shards.kvp, slice()); }
  /// Elements a head of a travelling partial result.
  double width() const {
    if (!mla()) return real(config.head_dim);
    return real(shards.values_before ? config.v_head_dim : config.kv_lora_rank);
  }
  double query_width() const {
    if (!mla()) return real(config.head_dim);
    return real(shards.absorb_before ? config.latent_width() : config.qk_head_dim());
  }
  DecodeTransfer output(int devices, int index) const { return all_reduce("o all-reduce", hidden(), devices, index); }
};

void add_tpla(const Step& s, DecodeTransfers& result) {
  const int g = s.shards.latent_shards, n = s.shards.tpa;
  if (s.shards.split_latent_rows) {
    result.add(at(DecodeStage::before_core, in_float32(all_reduce("rms scalar", s.batch, g, s.device % g))));
  }
  if (s.shards.scatter_values) {
    const std::int64_t heads = s.config.num_attention_heads;
    const double row = real(s.batch * s.config.v_head_dim);
    result.add(at(DecodeStage::partials,
                  reduce_scatter("v partials", row * real(heads), row * part_of(heads, g, s.device), g)));
  }
  result.add(s.output(n, s.device));
}

void add_exact_latent(const Step& s, DecodeTransfers& result) {
  const int g = s.shards.tpa;
  result.add(at(DecodeStage::before_core,
                in_float32(all_reduce("logits", s.batch * s.config.num_attention_heads * s.context, g, s.device))));
  result.add(s.output(g, s.device));
}

/// Queries gathered, log-sum-exps gathered, partial outputs reduce-scattered.
void add_kvp(const Step& s, DecodeTransfers& result) {
  const int n = s.shards.kvp, span = s.shards.group();
  const double b = real(s.batch), heads = real(s.column_heads()), mine = s.own_heads();
  const double wide = s.mla() ? real(s.config.latent_width()) : real(s.config.head_dim);
  const double latent = s.mla() ? real(s.config.kv_lora_rank) : real(s.config.head_dim);
  result.add(at(DecodeStage::before_core, all_gather("q gather", b * heads * wide, b * mine * wide, n)), span);
  result.add(at(DecodeStage::partials, in_float32(all_gather("lse gather", n * b * heads, b * heads, n))), span);
  result.add(at(DecodeStage::partials, reduce_scatter("partials", b * heads * latent, b * mine * latent, n)), span);
  result.add(s.output(s.shards.group(), s.device));
}

/// Slice 0 is the root: it collects partials, projects, and sends the block's input to the slices.
void add_medha(const Step& s, DecodeTransfers& result) {
  const double partials = real(s.batch) * real(s.column_heads());
  const bool root = s.slice() == 0;
  result.add({.name = "x to slices",
              .collective = DecodeCollective::send,
              .stage = DecodeStage::before_core,
              .devices = s.shards.kvp,
              .sent = root ? (s.shards.kvp - 1) * real(s.hidden()) : 0,
              .buffer = real(s.hidden())},
             s.shards.group());
  result.add({.name = "partials",
              .collective = DecodeCollective::send,
              .stage = DecodeStage::partials,
              .devices = s.shards.kvp,
              .sent = root ? 0 : partials * s.width(),
              .sent_f32 = root ? 0 : partials,
              .buffer = partials * s.width(),
              .buffer_f32 = partials},
             s.shards.group());
  if (root) result.add(s.output(s.shards.tpa, s.column()));
}

void add_helix(const Step& s, DecodeTransfers& result) {
  const double b = real(s.batch), heads = real(s.column_heads()), mine = s.own_heads();
  if (s.shards.gather_queries) {
    const double width = b * s.query_width();
    result.add(at(DecodeStage::before_core, all_gather("q gather", heads * width, mine * width, s.shards.kvp)),
               s.shards.group());
  }
  result.add({.name = "exchange",
              .collective = DecodeCollective::all_to_all,
              .stage = DecodeStage::partials,
              .devices = s.shards.kvp,
              .sent = b * (heads - mine) * s.width(),
              .sent_f32 = b * (heads - mine),
              .buffer = b * heads * s.width(),
              .buffer_f32 = b * heads},
             s.shards.group());
  result.add(s.output(s.shards.group(), s.device));
}

/// Tokens of their own on every group, experts or columns of the FFN over all devices. How many rows come is said
/// ahead, in four bytes to each device; they are counted with the dispatch.
void add_data_parallel_ffn(const ModelConfig& c, const DecodeShards& s, bool moe, std::int64_t batch, int device,
                           const RoutedRows* routed, DecodeTransfers& result) {
  const int n = s.devices();
  const double width = real(c.hidden_size), hidden = real(batch) * width;
  const double rows = part_of(batch, s.data_parallel, device / s.group()) / s.group(), share = rows * width;
  if (!moe || s.ep == 1) {
    result.add(all_gather("ffn gather", hidden, share, n));
    result.add(reduce_scatter("ffn scatter", hidden, share, n));
    return;
  }
  const double visits = rows * expected_other_devices(c.moe.n_routed_experts, c.moe.num_experts_per_tok, n);
  const RoutedRows travelling = routed != nullptr ? *routed : RoutedRows{visits, visits};
  const auto exchange = [&](std::string_view name, double sent, double counts) {
    result.add({.name = name,
                .collective = DecodeCollective::all_to_all,
                .devices = n,
                .sent = sent * width,
                .sent_f32 = counts,
                .buffer = sent * width * n / (n - 1),
                .buffer_f32 = counts * n / (n - 1)});
  };
  exchange("dispatch", travelling.sent, n - 1);
  exchange("combine", travelling.received, 0);
  result.add(all_gather("group gather", share * s.group(), share, s.group()));
}

}  // namespace

std::string_view name_of(DecodeScheme scheme) {
  constexpr std::array<std::string_view, 7> kNames = {"tp", "gla", "tpla", "exact-latent", "kvp", "medha", "helix"};
  return kNames[static_cast<std::size_t>(scheme)];
}

void DecodeTransfers::add(const DecodeTransfer& transfer, int span) {
  if (transfer.devices <= 1) return;
  ISOMER_CHECK(count_ < items_.size(), "{} exchanges in a layer", count_ + 1);
  items_[count_] = transfer;
  items_[count_++].span = span;
}

double DecodeTransfers::bytes_sent(double element_bytes) const {
  double bytes = 0;
  for (const DecodeTransfer& transfer : *this) bytes += transfer.bytes_sent(element_bytes);
  return bytes;
}

DecodeTransfers decode_attention_transfers(const ModelConfig& config, const DecodeShards& shards, std::int64_t batch,
                                           std::int64_t context, int device) {
  ISOMER_CHECK(device >= 0 && device < shards.group(), "device {} of a group of {}", device, shards.group());
  const Step step{config, shards, batch, context, device};
  DecodeTransfers result;
  switch (shards.scheme) {
    case DecodeScheme::tp:
    case DecodeScheme::gla: result.add(step.output(shards.tpa, device)); break;
    case DecodeScheme::tpla: add_tpla(step, result); break;
    case DecodeScheme::exact_latent: add_exact_latent(step, result); break;
    case DecodeScheme::kvp: add_kvp(step, result); break;
    case DecodeScheme::medha: add_medha(step, result); break;
    case DecodeScheme::helix: add_helix(step, result); break;
  }
  return result;
}

DecodeTransfers decode_ffn_transfers(const ModelConfig& config, const DecodeShards& shards, bool moe_layer,
                                     std::int64_t batch, int device, const RoutedRows* routed) {
  DecodeTransfers result;
  const std::int64_t hidden = batch * config.hidden_size;
  if (shards.data_parallel > 1) {
    add_data_parallel_ffn(config, shards, moe_layer, batch, device, routed, result);
  } else if (shards.scheme == DecodeScheme::medha) {
    if (device / shards.tpa == 0) result.add(all_reduce("ffn all-reduce", hidden, shards.tpa, device));
  } else if (moe_layer && shards.gather_experts && shards.ep > 1) {
    result.add(all_reduce("ffn all-reduce", hidden, shards.tpf, device % shards.tpf));
    result.add(all_gather("expert gather", shards.ep * real(hidden), real(hidden), shards.ep), shards.group());
  } else {
    result.add(all_reduce("ffn all-reduce", hidden, shards.group(), device));
  }
  return result;
}

std::vector<std::int64_t> rows_by_device(std::span<const std::int32_t> experts, std::int64_t experts_per_token,
                                         std::int64_t num_experts, int devices) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(devices));
  const auto per_token = static_cast<std::size_t>(experts_per_token);
  for (std::size_t first = 0; first < experts.size(); first += per_token) {
    std::vector<bool> visited(rows.size());
    for (const std::int32_t expert : experts.subspan(first, per_token)) {
      visited[static_cast<std::size_t>(expert * devices / num_experts)] = true;
    }
    for (std::size_t device = 0; device < rows.size(); ++device) rows[device] += visited[device] ? 1 : 0;
  }
  return rows;
}

double pipeline_elements(const ModelConfig& config, std::int64_t batch) { return real(batch * config.hidden_size); }

double decode_cache_elements(const ModelConfig& c, const DecodeShards& s) {
  if (c.attention == AttentionKind::gqa) {
    const std::int64_t heads = (c.num_key_value_heads + s.tpa - 1) / s.tpa;
    return 2 * real(heads * c.head_dim) / s.kvp;
  }
  const double d = real(c.kv_lora_rank), r = real(c.qk_rope_head_dim), m = real(s.shared_columns);
  switch (s.scheme) {
    case DecodeScheme::gla: return d / s.latent_shards + r;
    case DecodeScheme::tpla: return (d - m) / s.latent_shards + m + r;
    case DecodeScheme::exact_latent: return s.whole_rope ? d / s.latent_shards + r : (d + r) / s.latent_shards;
    default: return (d + r) / s.kvp;
  }
}

double expected_other_devices(std::int64_t experts, std::int64_t experts_per_token, std::int64_t devices) {
  if (devices <= 1) return 0;
  // C(E−E/N, k)/C(E, k): none of k distinct experts lies on one given device.
  const double local = real(experts) / real(devices);
  double none = 1;
  for (std::int64_t i = 0; i < experts_per_token; ++i) {
    none *= std::max(0.0, real(experts) - local - real(i)) / (real(experts) - real(i));
  }
  return real(devices - 1) * (1 - none);
}

}  // namespace isomer
