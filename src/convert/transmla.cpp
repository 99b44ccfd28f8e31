#include "convert/transmla.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "convert/observed_forward.h"
#include "convert/transform.h"
#include "core/error.h"
#include "kernels/reference/blocked_ops.h"
#include "layers/rope.h"

namespace isomer {

namespace {

using Values = std::vector<double>;

/// Row-major; the shapes are the caller's.
Values product(const Values& a, const Values& b, std::int64_t m, std::int64_t k, std::int64_t n,
               bool b_transposed = false) {
  Values c(static_cast<std::size_t>(m * n), 0);
  if (c.empty() || k == 0) return c;
  reference::gemm({.m = m,
                   .n = n,
                   .k = k,
                   .a = a.data(),
                   .a_stride = k,
                   .b = b.data(),
                   .b_stride = b_transposed ? k : n,
                   .b_transposed = b_transposed,
                   .c = c.data(),
                   .c_stride = n});
  return c;
}

/// A·S·Aᵀ, A [m, k].
Values congruent(const Values& a, const Values& s, std::int64_t m, std::int64_t k) {
  return product(product(a, s, m, k, k), a, m, k, m, true);
}

Values rows_of(const Values& matrix, std::int64_t width, std::int64_t begin, std::int64_t count) {
  const auto first = matrix.begin() + begin * width;
  return {first, first + count * width};
}

std::int64_t key_width(const ModelConfig& config) { return config.num_key_value_heads * config.head_dim; }
std::int64_t collapse(const ModelConfig& config, const TransMlaOptions& options) {
  return config.head_dim / options.qk_rope_head_dim;
}

/// One component of a group: its place before sorting, and the frequency that it turns with.
struct Component {
  std::int64_t group, index, frequency;
  bool roped;
};

/// All pairs, the roped ones first and by frequency.
std::vector<Component> components_of(const ModelConfig& config, const TransMlaOptions& options) {
  const std::int64_t fold = options.freqfold, c = collapse(config, options);
  const std::int64_t num_groups = config.head_dim / 2 / fold, kept = fold / c;
  std::vector<Component> roped, rest;
  for (std::int64_t group = 0; group < num_groups; ++group) {
    for (std::int64_t i = 0; i < config.num_key_value_heads * fold; ++i) {
      if (i < kept) {
        roped.push_back({group, i, group * fold + i * c, true});
      } else {
        rest.push_back({group, i, group * fold + i % fold, false});
      }
    }
  }
  roped.insert(roped.end(), rest.begin(), rest.end());
  return roped;
}

/// Columns of the old keys that a group's vectors are made of: the real parts of its frequencies, head by head.
std::vector<std::int64_t> group_columns(const ModelConfig& config, std::int64_t fold, std::int64_t group) {
  std::vector<std::int64_t> columns;
  for (std::int64_t head = 0; head < config.num_key_value_heads; ++head) {
    for (std::int64_t f = 0; f < fold; ++f) columns.push_back(head * config.head_dim + group * fold + f);
  }
  return columns;
}

/// Eigenvectors of real and imaginary halves taken as samples of one vector.
EigenSystem group_system(const ModelConfig& config, const Values& key_moment,
                         const std::vector<std::int64_t>& columns) {
  const std::int64_t width = key_width(config), half = config.head_dim / 2;
  const auto size = static_cast<std::int64_t>(columns.size());
  Values moment;
  for (const auto a : columns) {
    for (const auto b : columns) {
      const auto at = [&](std::int64_t i, std::int64_t j) {
        return key_moment[static_cast<std::size_t>(i * width + j)];
      };
      moment.push_back(at(a, b) + at(a + half, b + half));
    }
  }
  return symmetric_eigensystem(moment, size);
}

std::int64_t rope_dim_of(const ModelConfig& config, const TransMlaOptions& options, TransMlaStep step) {
  return step == TransMlaStep::rotated ? key_width(config) : options.qk_rope_head_dim;
}
std::int64_t rank_of(const ModelConfig& config, const TransMlaOptions& options, TransMlaStep step) {
  if (step == TransMlaStep::reduced) return options.kv_lora_rank;
  return 2 * key_width(config) - rope_dim_of(config, options, step);
}

Tensor tensor_of(const char* name, const Values& values, const Shape& shape) {
  Tensor tensor = Tensor::unrecorded(name, DType::f32, shape);
  ISOMER_CHECK(tensor.numel() == std::ssize(values), "{}: {} values for {}", name, values.size(), to_string(shape));
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.data<float>()[i] = static_cast<float>(values[static_cast<std::size_t>(i)]);
  }
  return tensor;
}

/// Per head: its old query, for the keys without RoPE, then what meets the roped keys; all scaled for the new head's
/// softmax scale.
Tensor query_weight(const ModelConfig& config, const Values& q_proj, const KeyRotation& rotation, std::int64_t rope) {
  const std::int64_t w = config.head_dim, hidden = config.hidden_size, width = key_width(config);
  const std::int64_t heads = config.num_attention_heads;
  const double scale = std::sqrt(static_cast<double>(w + rope) / static_cast<double>(w));
  Values all;
  all.reserve(static_cast<std::size_t>(heads * (w + rope) * hidden));
  for (std::int64_t head = 0; head < heads; ++head) {
    const Values query = rows_of(q_proj, hidden, head * w, w);
    const std::int64_t kv_head = head * config.num_key_value_heads / heads;
    Values turn;  // [rope, w]: the columns of R that belong to this KV head
    for (std::int64_t row = 0; row < rope; ++row) {
      const auto from = rotation.rows.begin() + row * width + kv_head * w;
      turn.insert(turn.end(), from, from + w);
    }
    const Values roped = product(turn, query, rope, w, hidden);
    for (const double value : query) all.push_back(value * scale);
    for (const double value : roped) all.push_back(value * scale);
  }
  return tensor_of("q_proj", all, {heads * (w + rope), hidden});
}

double mean_column_norm(const Values& moment, std::int64_t size, std::int64_t begin, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = begin; i < begin + count; ++i) sum += std::sqrt(moment[static_cast<std::size_t>(i * size + i)]);
  return sum / static_cast<double>(count);
}

/// The latent's two factors: `latent` [d, D] and, for all KV heads together, `keys` [k·w − r, d] and `values` [k·w, d].
struct Factors {
  Values latent, keys, values;
};
Factors factorise(const ModelConfig& config, const TransMlaOptions& options, Values joint, std::int64_t num_keys,
                  std::int64_t rank, const InputMoment& moment) {
  const std::int64_t hidden = config.hidden_size, num_values = key_width(config), size = num_keys + num_values;
  Values second = congruent(joint, moment.second, size, hidden);
  double rho = 1;
  if (num_keys > 0) {
    const double of_keys = mean_column_norm(second, size, 0, num_keys);
    const double of_values = mean_column_norm(second, size, num_keys, num_values);
    if (of_keys > 0 && of_values > 0) rho = of_keys / (of_values * options.balance);
  }
  for (std::int64_t i = 0; i < num_keys * hidden; ++i) joint[static_cast<std::size_t>(i)] /= rho;
  for (std::int64_t i = 0; i < size; ++i) {
    for (std::int64_t j = 0; j < size; ++j) {
      second[static_cast<std::size_t>(i * size + j)] /= (i < num_keys ? rho : 1) * (j < num_keys ? rho : 1);
    }
  }
  const EigenSystem system = symmetric_eigensystem(second, size);
  Values leading, transposed(static_cast<std::size_t>(rank * size));  // [size, rank]
  for (std::int64_t i = 0; i < size; ++i) {
    const double factor = i < num_keys ? rho : 1;
    for (std::int64_t j = 0; j < rank; ++j) {
      const double value = system.vectors[static_cast<std::size_t>(i * size + j)];
      transposed[static_cast<std::size_t>(j * size + i)] = value;
      leading.push_back(value * factor);
    }
  }
  return {.latent = product(transposed, joint, rank, size, hidden),
          .keys = rows_of(leading, rank, 0, num_keys),
          .values = rows_of(leading, rank, num_keys, num_values)};
}

/// Per query head n = w key rows, S_j·Rᵀ[:, nope]·keys, and w value rows, those of its KV head.
Tensor up_projection(const ModelConfig& config, const KeyRotation& rotation, const Factors& factors, std::int64_t rope,
                     std::int64_t rank) {
  const std::int64_t w = config.head_dim, width = key_width(config), num_keys = width - rope;
  const std::int64_t heads = config.num_attention_heads;
  Values all;
  all.reserve(static_cast<std::size_t>(heads * 2 * w * rank));
  for (std::int64_t head = 0; head < heads; ++head) {
    const std::int64_t kv_head = head * config.num_key_value_heads / heads;
    Values back(static_cast<std::size_t>(w * num_keys));  // [w, k·w − r]
    for (std::int64_t i = 0; i < num_keys; ++i) {
      for (std::int64_t j = 0; j < w; ++j) {
        back[static_cast<std::size_t>(j * num_keys + i)] =
            rotation.rows[static_cast<std::size_t>((rope + i) * width + kv_head * w + j)];
      }
    }
    const Values keys = product(back, factors.keys, w, num_keys, rank);
    const Values values = rows_of(factors.values, rank, kv_head * w, w);
    all.insert(all.end(), keys.begin(), keys.end());
    all.insert(all.end(), values.begin(), values.end());
  }
  return tensor_of("kv_b_proj", all, {heads * 2 * w, rank});
}

}  // namespace

void check_transmla_options(const TransMlaOptions& options, const ModelConfig& config) {
  if (config.attention != AttentionKind::gqa) {
    invalid_argument("{}: its attention is latent already; transmla takes grouped-query attention", config.name);
  }
  const std::int64_t w = config.head_dim, r = options.qk_rope_head_dim, fold = options.freqfold;
  if (r < 2 || r % 2 != 0 || r > w || w % r != 0) {
    invalid_argument("--qk-rope-head-dim {}: an even divisor of head_dim, {}", r, w);
  }
  if (fold < 1 || (w / 2) % fold != 0 || fold % (w / r) != 0) {
    invalid_argument("--freqfold {}: a multiple of head_dim/qk_rope_head_dim, {}, that divides head_dim/2, {}", fold,
                     w / r, w / 2);
  }
  const std::int64_t most = 2 * key_width(config) - r;
  if (options.kv_lora_rank < 1 || options.kv_lora_rank > most) {
    invalid_argument("--kv-lora-rank {}: 1 to {}, keys and values of all heads less the rope part",
                     options.kv_lora_rank, most);
  }
  if (!(options.balance > 0) || !std::isfinite(options.balance)) {
    invalid_argument("--balance {}: expected a positive number", options.balance);
  }
  const RopeScalingKind scaling = config.rope.scaling;
  if (scaling == RopeScalingKind::yarn || scaling == RopeScalingKind::longrope) {
    invalid_argument(
        "{}: its RoPE scaling changes magnitudes or divides each pair by a number of its own; only none, "
        "linear and llama3 are carried over",
        config.name);
  }
}

KeyRotation rotate_keys(const ModelConfig& config, const TransMlaOptions& options, const std::vector<double>& k_proj,
                        const InputMoment& moment) {
  const std::int64_t width = key_width(config), half = config.head_dim / 2;
  const Values key_moment = congruent(k_proj, moment.second, width, config.hidden_size);
  std::vector<EigenSystem> systems;
  std::vector<std::vector<std::int64_t>> columns;
  for (std::int64_t group = 0; group < half / options.freqfold; ++group) {
    columns.push_back(group_columns(config, options.freqfold, group));
    systems.push_back(group_system(config, key_moment, columns.back()));
  }
  KeyRotation rotation{.rows = Values(static_cast<std::size_t>(width * width), 0)};
  std::int64_t row = 0;
  for (const Component& component : components_of(config, options)) {
    const auto group = static_cast<std::size_t>(component.group);
    const auto size = static_cast<std::int64_t>(columns[group].size());
    for (std::int64_t i = 0; i < size; ++i) {
      const double value = systems[group].vectors[static_cast<std::size_t>(i * size + component.index)];
      const std::int64_t column = columns[group][static_cast<std::size_t>(i)];
      rotation.rows[static_cast<std::size_t>(row * width + column)] = value;
      rotation.rows[static_cast<std::size_t>((row + 1) * width + column + half)] = value;
    }
    rotation.frequency.push_back(component.frequency);
    row += 2;
  }
  return rotation;
}

ModelConfig transmla_config(const ModelConfig& config, const TransMlaOptions& options, TransMlaStep step,
                            const std::vector<std::int64_t>& frequency) {
  ModelConfig mla = config;
  mla.model_type = "deepseek_v2";
  mla.attention = AttentionKind::mla;
  mla.num_key_value_heads = config.num_attention_heads;
  mla.head_dim = 0;
  mla.q_lora_rank = 0;
  mla.kv_lora_rank = rank_of(config, options, step);
  mla.qk_nope_head_dim = config.head_dim;
  mla.qk_rope_head_dim = rope_dim_of(config, options, step);
  mla.v_head_dim = config.head_dim;
  mla.kv_a_layernorm = false;
  mla.rope.interleave = true;
  if (step != TransMlaStep::rotated) return mla;
  const auto original = rope_frequencies(config.rope, config.head_dim, config.max_position_embeddings).inv_freq;
  mla.rope.scaling = RopeScalingKind::longrope;
  mla.rope.factor = 1;
  mla.rope.original_max_position_embeddings = std::max<std::int64_t>(config.max_position_embeddings, 2);
  mla.rope.long_factor.clear();
  for (std::size_t i = 0; i < frequency.size(); ++i) {
    const double plain =
        std::pow(config.rope.theta, -2.0 * static_cast<double>(i) / static_cast<double>(mla.qk_rope_head_dim));
    mla.rope.long_factor.push_back(plain / original[static_cast<std::size_t>(frequency[i])]);
  }
  mla.rope.short_factor = mla.rope.long_factor;
  return mla;
}

AttentionWeights transmla_layer(const ModelConfig& config, const TransMlaOptions& options, TransMlaStep step,
                                const AttentionWeights& weights, const KeyRotation& rotation,
                                const InputMoment& moment) {
  const std::int64_t width = key_width(config), hidden = config.hidden_size;
  const std::int64_t rope = rope_dim_of(config, options, step), rank = rank_of(config, options, step);
  const Values keys = product(rotation.rows, widened(weights.k_proj), width, width, hidden);
  Values joint = rows_of(keys, hidden, rope, width - rope);
  const Values values = widened(weights.v_proj);
  joint.insert(joint.end(), values.begin(), values.end());
  const Factors factors = factorise(config, options, std::move(joint), width - rope, rank, moment);
  Values down = factors.latent;
  down.insert(down.end(), keys.begin(), keys.begin() + rope * hidden);
  AttentionWeights mla;
  mla.input_layernorm = weights.input_layernorm;
  mla.o_proj = weights.o_proj;
  mla.q_proj = query_weight(config, widened(weights.q_proj), rotation, rope);
  mla.kv_a_proj = tensor_of("kv_a_proj_with_mqa", down, {rank + rope, hidden});
  mla.kv_b_proj = up_projection(config, rotation, factors, rope, rank);
  return mla;
}

}  // namespace isomer
