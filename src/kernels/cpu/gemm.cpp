#include "kernels/cpu/gemm.h"

#include <cblas.h>
#include <dlfcn.h>

#include <cstring>
#include <oneapi/dnnl/dnnl.hpp>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/cpu_features.h"
#include "core/error.h"

namespace isomer::cpu {

namespace {

using DnnlType = dnnl::memory::data_type;

DnnlType dnnl_type(DType dtype) { return dtype == DType::bf16 ? DnnlType::bf16 : DnnlType::f32; }

const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

struct Key {
  std::int64_t m, n, k, lda, ldb, ldc;
  std::uint32_t flags;
  bool operator==(const Key&) const = default;
};

struct KeyHash {
  std::size_t operator()(const Key& key) const {
    std::uint64_t hash = key.flags;
    for (auto value : {key.m, key.n, key.k, key.lda, key.ldb, key.ldc}) {
      hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x9e3779b97f4a7c15ull;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

struct Primitive {
  dnnl::matmul matmul;
  dnnl::memory::desc a, b, c;
};

dnnl::memory::desc describe(std::int64_t rows, std::int64_t columns, DType dtype, std::int64_t ld, bool transposed) {
  const dnnl::memory::dims strides = transposed ? dnnl::memory::dims{1, ld} : dnnl::memory::dims{ld, 1};
  return {{rows, columns}, dnnl_type(dtype), strides};
}

Primitive make_primitive(const GemmParams& p) {
  Primitive made;
  made.a = describe(p.m, p.k, p.in, p.a.ld, p.a.transposed);
  made.b = describe(p.k, p.n, p.in, p.b.ld, p.b.transposed);
  made.c = describe(p.m, p.n, p.out, p.ldc, false);
  dnnl::primitive_attr attributes;
  if (p.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
  const dnnl::matmul::desc description(made.a, made.b, made.c);
  made.matmul = dnnl::matmul(dnnl::matmul::primitive_desc(description, attributes, cpu_engine()));
  return made;
}

const Primitive& cached_primitive(const GemmParams& p) {
  // Per thread, so no lock; bounded, so that a long run over many shapes doesn't grow without end.
  constexpr std::size_t kMaxCached = 512;
  thread_local std::unordered_map<Key, Primitive, KeyHash> cache;
  const std::uint32_t flags = (p.a.transposed ? 1u : 0u) | (p.b.transposed ? 2u : 0u) | (p.accumulate ? 4u : 0u) |
                              (p.in == DType::bf16 ? 8u : 0u) | (p.out == DType::bf16 ? 16u : 0u);
  const Key key{p.m, p.n, p.k, p.a.ld, p.b.ld, p.ldc, flags};
  if (auto found = cache.find(key); found != cache.end()) return found->second;
  if (cache.size() >= kMaxCached) cache.clear();
  return cache.emplace(key, make_primitive(p)).first->second;
}

void gemm_onednn(const GemmParams& p) {
  thread_local dnnl::stream stream(cpu_engine());
  const Primitive& primitive = cached_primitive(p);
  const dnnl::memory a(primitive.a, cpu_engine(), const_cast<void*>(p.a.data));
  const dnnl::memory b(primitive.b, cpu_engine(), const_cast<void*>(p.b.data));
  const dnnl::memory c(primitive.c, cpu_engine(), p.c);
  primitive.matmul.execute(stream, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}});
}

void gemm_f64(const GemmParams& p) {
  cblas_dgemm(CblasRowMajor, p.a.transposed ? CblasTrans : CblasNoTrans, p.b.transposed ? CblasTrans : CblasNoTrans,
              static_cast<blasint>(p.m), static_cast<blasint>(p.n), static_cast<blasint>(p.k), 1.0,
              static_cast<const double*>(p.a.data), static_cast<blasint>(p.a.ld), static_cast<const double*>(p.b.data),
              static_cast<blasint>(p.b.ld), p.accumulate ? 1.0 : 0.0, static_cast<double*>(p.c),
              static_cast<blasint>(p.ldc));
}

// oneDNN multiplies bfloat16 only where AVX-512 is. Elsewhere the operands of this tile are widened first.
bool onednn_has_bf16() { return cpu_features().avx512; }

std::vector<float> widen(const GemmOperand& operand, std::int64_t rows, std::int64_t columns) {
  const std::int64_t outer = operand.transposed ? columns : rows, inner = operand.transposed ? rows : columns;
  std::vector<float> wide(static_cast<std::size_t>(outer * inner));
  const auto* source = static_cast<const bf16*>(operand.data);
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::int64_t i = 0; i < inner; ++i) wide[static_cast<std::size_t>(o * inner + i)] = source[o * operand.ld + i];
  }
  return wide;
}

void gemm_bf16_widened(const GemmParams& p) {
  const auto a = widen(p.a, p.m, p.k);
  const auto b = widen(p.b, p.k, p.n);
  GemmParams wide = p;
  wide.in = wide.out = DType::f32;
  wide.a = {a.data(), p.a.transposed ? p.m : p.k, p.a.transposed};
  wide.b = {b.data(), p.b.transposed ? p.k : p.n, p.b.transposed};
  if (p.out == DType::f32) return gemm_onednn(wide);
  std::vector<float> c(static_cast<std::size_t>(p.m * p.n));
  wide.c = c.data();
  wide.ldc = p.n;
  gemm_onednn(wide);
  auto* out = static_cast<bf16*>(p.c);
  for (std::int64_t row = 0; row < p.m; ++row) {
    for (std::int64_t column = 0; column < p.n; ++column) {
      out[row * p.ldc + column] = bf16(c[static_cast<std::size_t>(row * p.n + column)]);
    }
  }
}

// An empty sum: c is zero, or stays.
void clear_result(const GemmParams& p) {
  if (p.accumulate) return;
  const auto row_bytes = static_cast<std::size_t>(p.n * size_of(p.out));
  for (std::int64_t row = 0; row < p.m; ++row) {
    std::memset(static_cast<char*>(p.c) + row * p.ldc * size_of(p.out), 0, row_bytes);
  }
}

}  // namespace

void use_one_library_thread() {
  using SetNumThreads = void (*)(int);
  static const auto set_num_threads = reinterpret_cast<SetNumThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  static const bool openblas_told = [] {
    openblas_set_num_threads(1);  // a process-wide setting
    return true;
  }();
  static_cast<void>(openblas_told);
  thread_local const bool done = [] {
    if (set_num_threads != nullptr) set_num_threads(1);
    return true;
  }();
  static_cast<void>(done);
}

void gemm(const GemmParams& params, Bf16Products bf16_products) {
  if (params.m == 0 || params.n == 0) return;
  if (params.k == 0) return clear_result(params);
  use_one_library_thread();
  if (params.in == DType::f64) return gemm_f64(params);
  const bool widened = bf16_products == Bf16Products::widened || !onednn_has_bf16();
  if (params.in == DType::bf16 && widened) return gemm_bf16_widened(params);
  gemm_onednn(params);
}

std::string describe_gemm(DType in, DType out) {
  if (in == DType::f64) return "openblas dgemm";
  if (in == DType::f32) return "onednn f32";
  if (onednn_has_bf16()) return fmt::format("onednn bf16 to {}", name_of(out));
  return "onednn f32 on widened bf16 (onednn bf16 declines: the processor has no AVX-512)";
}

}  // namespace isomer::cpu
