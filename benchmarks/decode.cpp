// Decode: absorbed attention over pages of a bfloat16 cache, as a share of the multiply-add peak of the same run; and
// whole decode steps of one sequence on a model larger than the caches, as a share of what its bytes take at the read
// bandwidth of the same run; and a prompt, as a share of a large product's rate. One thread, by processor time. Holds
// pages against the plain twin before it times.
// With --layouts: decode layouts on two ranks instead. With --model PATH: steps and prompts of that checkpoint, and
// where their time goes.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

#include "cache/kv_cache.h"
#include "comm/group.h"
#include "core/cpu_features.h"
#include "cost/decode_bytes.h"
#include "fma_peak.h"
#include "infer/engine.h"
#include "kernels/attention_registry.h"
#include "kernels/matmul.h"
#include "kernels/reference/attention.h"
#include "model/checkpoint.h"
#include "study/layout_times.h"

namespace isomer {
namespace {

constexpr std::int64_t kLatent = 512, kRope = 64, kWidth = kLatent + kRope;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void fill(const Tensor& x, std::uint64_t state) {
  visit_dtype(x.dtype(), [&]<class T>() {
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      x.data<T>()[i] = static_cast<T>((static_cast<double>(state >> 11) * 0x1p-53 - 0.5) * 3.46);
    }
  });
}

/// GB/s of one thread that reads 512 MiB; the best of a few.
double read_bandwidth() {
  const Tensor memory = Tensor::unrecorded("bench", DType::f32, {std::int64_t{1} << 27});
  fill(memory, 1);
  const auto* words = static_cast<const std::uint64_t*>(memory.raw());
  double best = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::uint64_t sum[8] = {};
    const double begin = thread_cpu_s();
    for (std::int64_t i = 0; i < memory.nbytes() / 8; i += 8) {
      for (int lane = 0; lane < 8; ++lane) sum[lane] += words[i + lane];
    }
    volatile std::uint64_t keep = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
    (void)keep;
    best = std::max(best, static_cast<double>(memory.nbytes()) / (thread_cpu_s() - begin) * 1e-9);
  }
  return best;
}

/// A cache of `sequences` of `context` seeded rows, whose pages lie mixed.
struct FilledCache {
  FilledCache(RankContext& ctx, std::int64_t context, int sequences)
      : cache(ctx, {.num_layers = 1,
                    .row = {1, kWidth, kLatent, true},
                    .dtype = DType::bf16,
                    .num_pages = sequences * ((context + 63) / 64)}) {
    for (int s = 0; s < sequences; ++s) ids.push_back(cache.add_sequence());
    for (std::int64_t done = 0; done < context; done += 64) {
      for (const int id : ids) {
        const KvCache::Growth growth{id, std::min<std::int64_t>(64, context - done)};
        cache.grow({&growth, 1});
      }
    }
    fill(cache.keys(0), 2);
  }
  AttentionInputs inputs(const Tensor& q, int id) const {
    const std::int64_t length = cache.length(id);
    AttentionInputs in{.q = q, .k = cache.keys(0), .v = cache.values(0)};
    in.query_runs = {{.length = 1, .position = length - 1}};
    in.key_runs = cache.runs(id, 0, length);
    in.scale = 3 / std::sqrt(static_cast<double>(kWidth));
    return in;
  }
  KvCache cache;
  std::vector<int> ids;
};

bool check_pages(RankContext& ctx) {
  const FilledCache filled(ctx, 1000, 3);
  const Tensor q = Tensor::unrecorded("bench", DType::bf16, {1, 16, kWidth});
  fill(q, 3);
  const auto make = [&] { return Tensor::unrecorded("bench", DType::bf16, {1, 16, kLatent}); };
  const Tensor out = make(), expected = make();
  const Tensor lse = Tensor::unrecorded("bench", DType::f32, {16, 1}),
               other = Tensor::unrecorded("b", DType::f32, {16, 1});
  const AttentionInputs in = filled.inputs(q, filled.ids[1]);
  fused_attention_forward(ctx, in, out, lse);
  reference::attention_forward(in, expected, other);
  double error = 0;
  for (std::int64_t i = 0; i < out.numel(); ++i) {
    error = std::max(error, std::abs(static_cast<double>(out.data<bf16>()[i]) - expected.data<bf16>()[i]));
  }
  // Values of size 1.7, probabilities rounded to bfloat16 on the way.
  if (error < 4 * 0x1p-7) return true;
  std::printf("paged attention is off by %g\n", error);
  return false;
}

void time_attention(RankContext& ctx, double peak, double bandwidth) {
  std::printf("%-34s %10s %9s %8s %9s\n", "absorbed attention, one query", "us", "GFLOP/s", "of peak", "of memory");
  for (const std::int64_t heads : {std::int64_t{128}, std::int64_t{16}}) {
    const Tensor q = Tensor::unrecorded("bench", DType::bf16, {1, heads, kWidth});
    fill(q, 4);
    const Tensor out = Tensor::unrecorded("bench", DType::bf16, {1, heads, kLatent});
    const Tensor lse = Tensor::unrecorded("bench", DType::f32, {heads, 1});
    for (const std::int64_t context : {4096, 8192, 16384, 32768}) {
      // Sequences in turn, 256 MB and more, so that rows come from memory.
      const FilledCache filled(ctx, context, static_cast<int>(std::max<std::int64_t>(3, (1 << 18) / context)));
      std::vector<double> times;
      for (const int id : filled.ids) {
        const AttentionInputs in = filled.inputs(q, id);
        const double begin = thread_cpu_s();
        fused_attention_forward(ctx, in, out, lse);
        times.push_back(thread_cpu_s() - begin);
      }
      const double seconds = median(times),
                   gflops = 2e-9 * static_cast<double>(heads * context * (kWidth + kLatent)) / seconds;
      std::printf("h=%-4ld %6ld cached tokens %11s %10.0f %9.1f %7.1f%% %8.1f%%\n", static_cast<long>(heads),
                  static_cast<long>(context), "", seconds * 1e6, gflops, 100 * gflops / peak,
                  100 * 2e-9 * static_cast<double>(context * kWidth) / seconds / bandwidth);
    }
  }
}

/// Some 900 MB of bfloat16 weights: DeepSeek-V2-Lite's dense layer, six times.
ModelConfig large_config() {
  ModelConfig c = load_model_config("deepseek-v2-lite");
  c.num_hidden_layers = 6;
  c.moe.first_k_dense_replace = 6;
  c.vocab_size = 4096;
  return c;
}

/// Bytes of weights that a step reads: all but the embedding, of which it takes a row, unless that is the head too.
double step_weight_bytes(const ModelConfig& config, const ModelWeights& weights) {
  double bytes = 0;
  weights.for_each([&](const std::string& name, const Tensor& t) {
    const bool embedding = name.ends_with("embed_tokens.weight"), head = name.ends_with("lm_head.weight");
    if (config.tie_word_embeddings ? !head : !embedding) bytes += static_cast<double>(t.nbytes());
  });
  return bytes;
}

/// Operations that take most of `seconds` processor time of `count` runs, and what lies outside all of them.
void print_operations(const OpRecord& record, double seconds, int count) {
  std::map<std::string, double> by_name;
  for (const auto& [key, summary] : record.summaries()) by_name[key.name] += summary.cpu_s / count;
  std::vector<std::pair<double, std::string>> order;
  for (const auto& [name, cpu_s] : by_name) order.emplace_back(cpu_s, name);
  std::sort(order.rbegin(), order.rend());
  double others = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (i >= 8) {
      others += order[i].first;
    } else {
      std::printf("    %-32s %8.3f ms %6.1f%%\n", order[i].second.c_str(), order[i].first * 1e3,
                  100 * order[i].first / seconds);
    }
  }
  const double outside = seconds - record.cpu_s() / count;
  std::printf("    %-32s %8.3f ms %6.1f%%\n", "all others", others * 1e3, 100 * others / seconds);
  std::printf("    %-32s %8.3f ms %6.1f%%\n", "outside operations", outside * 1e3, 100 * outside / seconds);
}

struct Case {
  const ModelConfig& config;
  const ModelWeights& weights;
  bool operations = false;  // print where the time goes
};

void time_steps(RankContext& ctx, const Case& c, double bandwidth) {
  const double bytes = step_weight_bytes(c.config, c.weights);
  const DecodeLayout layout = parse_decode_layout("tp:1", c.config);
  std::printf("\n%-34s %10s %9s\n", "step of one sequence, bfloat16", "ms", "of memory");
  for (const std::int64_t context : {256, 2000}) {
    Engine engine(ctx, {.config = c.config, .layout = layout, .cache_tokens = context + 64}, c.weights);
    const int sequence = engine.add_sequence();
    engine.prefill(ctx, sequence, std::vector<std::int32_t>(static_cast<std::size_t>(context), 5));
    ctx.ops().clear();
    std::vector<double> times;
    double sum = 0;
    for (std::int32_t step = 0; step < 16; ++step) {
      const Engine::Input input{sequence, {&step, 1}};
      const double begin = thread_cpu_s();
      engine.decode(ctx, {&input, 1});
      times.push_back(thread_cpu_s() - begin);
      sum += times.back();
    }
    const double cached =
        static_cast<double>(2 * context * c.config.num_hidden_layers) * decode_cache_elements(c.config, layout.shards);
    std::printf("%4.0f MB weights, %6ld cached %6s %10.2f %8.1f%%\n", bytes * 1e-6, static_cast<long>(context), "",
                median(times) * 1e3, 100 * (bytes + cached) * 1e-9 / median(times) / bandwidth);
    if (c.operations) print_operations(ctx.ops(), sum / 16, 16);
  }
}

/// Attention of a V2-Lite layer in decode, two ranks of one thread each, sequences whose caches are filled by seed. Run
/// it on an idle machine of two cores: by wall time there, else by the virtual clock.
void time_layouts() {
  constexpr const char* kModel = "deepseek-v2-lite";
  constexpr std::int64_t kSequences = 8, kLayers = 3, kSteps = 7;
  constexpr std::uint64_t kSeed = 7;
  const ModelConfig config = attention_model(kModel, kLayers);
  const ModelWeights weights = initial_model_weights(config, 1, DType::bf16);
  std::printf("\n%-34s %10s %12s %14s\n", "2 ranks, 8 sequences, 3 layers", "ms a step", "cache/token", "sent a step");
  for (const std::int64_t context : {1024, 8192, 32768}) {
    for (const char* name : {"tp:2", "tpla:g=2", "gla:g=2", "exact-latent:2", "kvp:2"}) {
      const LayoutTime t = time_layout(config, weights, {kModel, name, context, kSequences}, kSteps, kSeed);
      std::printf("%-16s %6ld cached %10s %10.2f %12.0f %11.1f kB %s\n", name, static_cast<long>(context), "",
                  t.seconds * 1e3, t.cache_elements, t.bytes_sent * 1e-3, t.virtual_clock ? "(virtual clock)" : "");
    }
  }
}

/// GFLOP/s of one bfloat16 product of 2048³; the best of a few.
double matrix_rate(RankContext& ctx) {
  const auto make = [] { return Tensor::unrecorded("bench", DType::bf16, {2048, 2048}); };
  const Tensor a = make(), b = make(), c = make();
  fill(a, 5);
  fill(b, 6);
  double best = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const double begin = thread_cpu_s();
    matmul(ctx, "bench", a, b, c);
    best = std::max(best, 2e-9 * 2048 * 2048 * 2048 / (thread_cpu_s() - begin));
  }
  return best;
}

/// A prompt in chunks of 512; FLOPs are those of the record, every kernel's own.
void time_prefill(RankContext& ctx, const Case& c) {
  const double rate = matrix_rate(ctx);
  std::printf("\n%-34s %10s %9s %8s\n", "prefill of one prompt, bfloat16", "ms", "GFLOP/s", "of rate");
  for (const std::int64_t tokens : {512, 2048}) {
    Engine engine(ctx, {.config = c.config, .layout = parse_decode_layout("tp:1", c.config), .cache_tokens = tokens},
                  c.weights);
    std::vector<double> times;
    double flops = 0;
    for (int repeat = 0; repeat < 3; ++repeat) {
      const int sequence = engine.add_sequence();
      ctx.ops().clear();
      const double begin = thread_cpu_s();
      engine.prefill(ctx, sequence, std::vector<std::int32_t>(static_cast<std::size_t>(tokens), 5));
      times.push_back(thread_cpu_s() - begin);
      flops = ctx.ops().flops(Phase::forward);
      engine.remove_sequence(ctx, sequence);
    }
    std::printf("%6ld tokens %21s %10.0f %9.1f %7.1f%%  (one product of 2048^3: %.0f)\n", static_cast<long>(tokens), "",
                median(times) * 1e3, flops * 1e-9 / median(times), 100e-9 * flops / median(times) / rate, rate);
    if (c.operations) print_operations(ctx.ops(), times.back(), 1);
  }
}

/// A checkpoint's own steps and prompts instead of the synthetic ones.
int time_model(const std::string& path) {
  const ModelConfig config = load_model_config(path);
  const ModelWeights weights = load_model_weights(Checkpoint::open(path), config, DType::bf16);
  const double bandwidth = read_bandwidth();
  std::printf("%s: one thread, bfloat16; reads %.1f GB/s\n", config.name.c_str(), bandwidth);
  run_group({.num_ranks = 1, .threads_per_rank = 1}, [&](RankContext& ctx) {
    time_steps(ctx, {config, weights, true}, bandwidth);
    time_prefill(ctx, {config, weights, true});
  });
  return 0;
}

int run(bool layouts) {
  if (layouts) {
    time_layouts();
    return 0;
  }
  const double peak = fma_peak_gflops(DType::bf16), bandwidth = read_bandwidth();
  std::printf("one thread, bfloat16: multiply-add peak %.0f GFLOP/s, reads %.1f GB/s\n\n", peak, bandwidth);
  int status = 0;
  run_group({.num_ranks = 1, .threads_per_rank = 1}, [&](RankContext& ctx) {
    if (!check_pages(ctx)) {
      status = 1;
      return;
    }
    time_attention(ctx, peak, bandwidth);
    const ModelConfig config = large_config();
    const ModelWeights weights = initial_model_weights(config, 1, DType::bf16);
    time_steps(ctx, {config, weights}, bandwidth);
    time_prefill(ctx, {config, weights});
  });
  return status;
}

}  // namespace
}  // namespace isomer

int main(int argc, char** argv) {
  const std::string_view option = argc > 1 ? argv[1] : "";
  if (option == "--model" && argc > 2) return isomer::time_model(argv[2]);
  return isomer::run(option == "--layouts");
}
