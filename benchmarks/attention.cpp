// Attention forward and backward: GFLOP/s and share of the FMA peak measured in the same run. Checks against the plain
// twin before it times.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/cpu_features.h"
#include "fma_peak.h"
#include "kernels/attention_registry.h"
#include "kernels/reference/attention.h"

namespace isomer {
namespace {

struct Options {
  std::int64_t seq = 4096;
  std::int64_t heads = 16;
  int threads = 1;
  int repeats = 5;
  std::string only;  // part of a setup's name
  std::string json;
};

struct Setup {
  const char* name;
  DType dtype;
  std::int64_t num_queries, num_keys, heads, kv_heads, key_width, value_width;
  bool backward;
};

void fill(const Tensor& x, std::uint64_t seed) {
  visit_dtype(x.dtype(), [&]<class T>() {
    std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      x.data<T>()[i] = static_cast<T>((static_cast<double>(state >> 11) * 0x1p-53 - 0.5) * 3.46);
    }
  });
}

struct Data {
  Data(const Setup& s, std::int64_t num_queries, std::int64_t num_keys) {
    const auto tensor = [&](std::int64_t rows, std::int64_t heads, std::int64_t width, std::uint64_t seed) {
      const Tensor x = Tensor::unrecorded("bench", s.dtype, {rows, heads, width});
      fill(x, seed);
      return x;
    };
    in.q = tensor(num_queries, s.heads, s.key_width, 1);
    in.k = tensor(num_keys, s.kv_heads, s.key_width, 2);
    in.v = s.kv_heads == 1 ? in.k.slice(2, 0, s.value_width) : tensor(num_keys, s.kv_heads, s.value_width, 3);
    in.query_runs = {{.length = num_queries, .position = num_keys - num_queries}};
    in.key_runs = {{.length = num_keys}};
    in.scale = 3 / std::sqrt(static_cast<double>(s.key_width));
    out = tensor(num_queries, s.heads, s.value_width, 4);
    dout = tensor(num_queries, s.heads, s.value_width, 5);
    lse = Tensor::unrecorded("bench", DType::f32, {s.heads, num_queries});
    gradients.dq = tensor(num_queries, s.heads, s.key_width, 6);
    gradients.dk = tensor(num_keys, s.kv_heads, s.key_width, 7);
    gradients.dv = tensor(num_keys, s.kv_heads, s.value_width, 8);
  }
  AttentionInputs in;
  Tensor out, lse, dout;
  AttentionGradients gradients;
};

double value_at(const Tensor& x, std::int64_t i) {
  return visit_dtype(x.dtype(), [&]<class T>() { return static_cast<double>(x.data<T>()[i]); });
}

/// Largest |a − b| in ε of the dtype and of max|b|.
double error_of(const Tensor& a, const Tensor& b) {
  double error = 0;
  double largest = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const double difference = std::abs(value_at(a, i) - value_at(b, i));
    error = difference <= error ? error : difference;  // keeps NaN
    largest = std::max(largest, std::abs(value_at(b, i)));
  }
  return error / (largest * epsilon_of(a.dtype()));
}

/// Throws unless a small instance agrees with the twin.
double check(RankContext& ctx, const Setup& s) {
  const std::int64_t keys = std::min<std::int64_t>(s.num_keys, 150);
  const std::int64_t queries = std::min<std::int64_t>(s.num_queries, s.backward ? 150 : 3);
  Setup small = s;
  small.heads = std::min<std::int64_t>(s.heads, 4);
  small.kv_heads = std::min(small.heads, s.kv_heads);
  const Data fast(small, queries, keys);
  const Data plain(small, queries, keys);
  fused_attention_forward(ctx, fast.in, fast.out, fast.lse);
  reference::attention_forward(plain.in, plain.out, plain.lse);
  double error = error_of(fast.out, plain.out);
  if (s.backward) {
    fused_attention_backward(ctx, fast.in, plain.out, plain.lse, fast.dout, fast.gradients);
    reference::attention_backward(plain.in, plain.out, plain.lse, plain.dout, plain.gradients);
    error =
        std::max({error, error_of(fast.gradients.dq, plain.gradients.dq),
                  error_of(fast.gradients.dk, plain.gradients.dk), error_of(fast.gradients.dv, plain.gradients.dv)});
  }
  const double bound = s.dtype == DType::bf16 ? 4 : 64;
  if (!(error <= bound)) throw Error(fmt::format("{}: error {} eps against the twin, bound {}", s.name, error, bound));
  return error;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Median share of peak and GFLOP/s of `body`; the peak is measured beside each repetition.
template <class Body>
nlohmann::json measure(const Options& options, const Setup& s, const char* pass, RankContext& ctx, Body&& body) {
  std::vector<double> rates, shares;
  body();
  for (int i = 0; i < options.repeats; ++i) {
    const double before = fma_peak_gflops(s.dtype);
    const double flops_before = ctx.ops().flops(ctx.phase());
    // One thread by its processor time, so that a busy machine does not count; several by the wall.
    const auto now = options.threads == 1 ? thread_cpu_s : wall_clock_s;
    const double begin = now();
    body();
    const double seconds = now() - begin;
    const double peak = std::max(before, fma_peak_gflops(s.dtype)) * options.threads;
    rates.push_back((ctx.ops().flops(ctx.phase()) - flops_before) / seconds * 1e-9);
    shares.push_back(rates.back() / peak);
  }
  const double rate = median(rates);
  const double share = median(shares);
  std::printf("%-22s %-5s %-9s %8.1f GFLOP/s  %5.1f %% of peak (best %.1f %%)\n", s.name,
              std::string(name_of(s.dtype)).c_str(), pass, rate, 100 * share,
              100 * *std::max_element(shares.begin(), shares.end()));
  std::fflush(stdout);
  return {{"name", s.name}, {"dtype", name_of(s.dtype)}, {"pass", pass}, {"gflops", rate}, {"share_of_peak", share}};
}

nlohmann::json run_setup(const Options& options, const Setup& s) {
  RankContext ctx({.num_threads = options.threads});
  const double error = check(ctx, s);
  const Data data(s, s.num_queries, s.num_keys);
  nlohmann::json results = nlohmann::json::array();
  results.push_back(
      measure(options, s, "forward", ctx, [&] { fused_attention_forward(ctx, data.in, data.out, data.lse); }));
  if (s.backward)
    results.push_back(measure(options, s, "backward", ctx, [&] {
      fused_attention_backward(ctx, data.in, data.out, data.lse, data.dout, data.gradients);
    }));
  for (auto& result : results) result["error_eps"] = error;
  return results;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

int run(const Options& options) {
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  std::printf("%s, %s, %d thread(s), seq %lld, heads %lld\n", host, processor_name().c_str(), options.threads,
              static_cast<long long>(options.seq), static_cast<long long>(options.heads));
  nlohmann::json report = {{"schema_version", 1},
                           {"machine", host},
                           {"processor", processor_name()},
                           {"threads", options.threads},
                           {"seq", options.seq},
                           {"heads", options.heads},
                           {"results", nlohmann::json::array()}};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const double peak = fma_peak_gflops(dtype);
    std::printf("FMA peak %s: %.1f GFLOP/s a thread\n", std::string(name_of(dtype)).c_str(), peak);
    report[fmt::format("peak_{}_gflops", name_of(dtype))] = peak;
    const std::int64_t s = options.seq;
    const std::int64_t h = options.heads;
    const Setup setups[] = {
        {"prefill 192/128", dtype, s, s, h, h, 192, 128, true},
        {"absorbed 576/512", dtype, std::max<std::int64_t>(1, s / 16), s / 4, h, 1, 576, 512, true},
        {"decode 576/512 h=128", dtype, 1, 8192, 128, 1, 576, 512, false},
        {"decode 576/512 h=16", dtype, 1, 8192, 16, 1, 576, 512, false},
    };
    for (const Setup& setup : setups) {
      if (std::string(setup.name).find(options.only) == std::string::npos) continue;
      for (const auto& result : run_setup(options, setup)) report["results"].push_back(result);
    }
  }
  if (!options.json.empty()) std::ofstream(options.json) << report.dump(2) << "\n";
  return 0;
}

}  // namespace
}  // namespace isomer

int main(int argc, char** argv) {
  isomer::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--seq")
      options.seq = std::atoll(argv[i + 1]);
    else if (name == "--heads")
      options.heads = std::atoll(argv[i + 1]);
    else if (name == "--threads")
      options.threads = std::atoi(argv[i + 1]);
    else if (name == "--repeats")
      options.repeats = std::atoi(argv[i + 1]);
    else if (name == "--only")
      options.only = argv[i + 1];
    else if (name == "--json")
      options.json = argv[i + 1];
    else {
      std::fprintf(stderr, "unknown option %s; there are --seq, --heads, --threads, --repeats, --only, --json\n",
                   argv[i]);
      return 2;
    }
  }
  return isomer::run(options);
}
