#include "study/dump.h"

#include <cstring>
#include <fstream>

#include "model/safetensors.h"

namespace isomer {

namespace {

constexpr const char* kReader = R"(import json
import sys

import numpy as np

DTYPES = {"F32": np.float32, "F64": np.float64, "BF16": np.uint16}


def load(path):
    """All tensors of a safetensors file as {name: array}; bfloat16 is widened to float32."""
    with open(path, "rb") as file:
        data = file.read()
    size = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, info in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + offset for offset in info["data_offsets"])
        array = np.frombuffer(data[begin:end], DTYPES[info["dtype"]])
        if info["dtype"] == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = array.reshape(info["shape"])
    return tensors


if __name__ == "__main__":
    for name, array in load(sys.argv[1]).items():
        print(name, array.shape, array.dtype, "max |x| =", np.abs(array).max(initial=0))
)";

std::string readme(const BlockProblem& p, int num_ranks) {
  const auto& c = p.config;
  return fmt::format(
      R"(# One attention block, rank by rank

{}: y = x + MLA(RMSNorm(x)), {} tokens × {} sequences, {}, {} ranks. h = {}, n = {}, r = {}, v = {}, d = {}, D = {},
softmax scale {:.17g}, rope theta {}, pairs {}, first position {}.

| file | what |
|---|---|
| shared.safetensors | weights (names of a checkpoint's layer), x and dy of all tokens |
| LAYOUT/rankN.safetensors | what rank N had under that scheme |
| LAYOUT/result.safetensors | y and dx of all tokens and every weight's gradient, summed over the ranks |
| reference/result.safetensors | the same from one rank in float64; the inputs are those of shared.safetensors |
| read.py | `load(path)` gives {{name: array}}; run it on a file for a list |

Rows are sequence-major: token s of sequence b is row s·batch + b. Under schemes that spread heads rank N of P holds the
tokens [N·S/P, …) of every sequence (the first S mod P ranks one more), in y, dx and everything that is not "by heads". A
tensor "… by heads" has all tokens and the rank's h/P heads, from head N·h/P on. Under ring, latent-gather and latent-ring
rank N holds parts N and 2P−1−N of 2P such parts, and all heads. In a layout of two axes, P inner ranks and G groups, group
N / P holds parts g and 2G−1−g, its ranks deal them out in order, and "by heads" has the group's tokens. A latent row is
[ĉ | RoPE(k_pe)], d + r wide.

| tensor | shape |
|---|---|
| q, latent | [T, h, n+r], [T, d+r]: the rank's own tokens, rope applied |
| c | [T, d]: the latent before kv_a_layernorm |
| q / k / v / k_nope by heads | [S·batch, h/P, n+r, n or v]: after the all-to-all |
| latent gathered | [S·batch, d+r]: after the all-gather |
| core q, core k, core v, core q rope, core k rope | what enters attention; k and v of one head are shared by all |
| core output | [S·batch, h/P, v]; d wide where attention runs on the latent |
| core lse | [h/P, S·batch], natural logarithm (fused attention) |
| o | [T, h, v]: back at the tokens, the input of W_o |
| dO by heads, dQ, dK, dV | gradients before and after their all-to-alls |
| d latent | [T, d+r]: after the reduce-scatter |
| y, dx | [T, D] |
| partial_grad.NAME | this rank's share of a weight's gradient; the sum over ranks is the gradient. Under laga and absorbed
  kv_b_proj's share is complete and has the rank's heads only |
)",
      c.name, p.seq, p.batch, name_of(p.dtype), num_ranks, c.num_attention_heads, c.qk_nope_head_dim,
      c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank, c.hidden_size, softmax_scale(c), c.rope.theta,
      c.rope.interleave ? "adjacent (2i, 2i+1)" : "halves (i, i + r/2)", p.first_position);
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream out(path);
  out << text;
  out.close();
  if (!out) throw Error(fmt::format("{}: can't be written", path.string()));
}

Tensor contiguous_copy(const Tensor& tensor) {
  const Tensor copy = Tensor::unrecorded("dump", tensor.dtype(), tensor.shape());
  const auto element = static_cast<std::size_t>(size_of(tensor.dtype()));
  auto* out = static_cast<char*>(copy.raw());
  std::vector<std::int64_t> index(tensor.shape().size(), 0);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    std::int64_t offset = 0;
    for (std::size_t axis = 0; axis < index.size(); ++axis) offset += index[axis] * tensor.strides()[axis];
    std::memcpy(out, static_cast<const char*>(tensor.raw()) + offset * static_cast<std::int64_t>(element), element);
    out += element;
    for (std::size_t axis = index.size(); axis-- > 0;) {
      if (++index[axis] < tensor.shape()[axis]) break;
      index[axis] = 0;
    }
  }
  return copy;
}

}  // namespace

void check_dump_directory(const std::filesystem::path& directory) {
  if (std::filesystem::exists(directory) &&
      (!std::filesystem::is_directory(directory) || !std::filesystem::is_empty(directory))) {
    invalid_argument("--dump {}: it exists and is not an empty directory; name a new one", directory.string());
  }
}

namespace {

std::vector<TensorSource> shared_tensors(const BlockData& data) {
  std::vector<TensorSource> shared;
  data.weights.for_each(
      [&](std::string_view name, const Tensor& t) { shared.push_back(tensor_source(std::string(name), t)); });
  shared.push_back(tensor_source("x", data.x));
  shared.push_back(tensor_source("dy", data.dy));
  return shared;
}

}  // namespace

Dump::Dump(std::filesystem::path directory, const BlockProblem& problem, const BlockData& data, int num_ranks,
           bool at_root)
    : Dump(std::move(directory), readme(problem, num_ranks),
           at_root ? shared_tensors(data) : std::vector<TensorSource>(), num_ranks, at_root) {}

Dump::Dump(std::filesystem::path directory, const std::string& readme, const std::vector<TensorSource>& shared,
           int num_ranks, bool at_root)
    : directory_(std::move(directory)), num_ranks_(num_ranks) {
  if (!at_root) return;
  check_dump_directory(directory_);
  std::filesystem::create_directories(directory_);
  write_safetensors(directory_ / "shared.safetensors", shared);
  write_text(directory_ / "README.md", readme);
  write_text(directory_ / "read.py", kReader);
}

DumpSink Dump::sink() {
  return [this](int rank, const std::string& name, const Tensor& tensor) {
    const auto slash = name.find('/');
    Tensor copy = contiguous_copy(tensor);
    const std::lock_guard lock(mutex_);
    tensors_[{name.substr(0, slash), rank}].insert_or_assign(name.substr(slash + 1), std::move(copy));
  };
}

void Dump::write_result(const std::string& layout, const std::map<std::string, Tensor>& tensors) const {
  std::vector<TensorSource> sources;
  for (const auto& [name, tensor] : tensors) sources.push_back(tensor_source(name, tensor));
  std::filesystem::create_directories(directory_ / layout);
  write_safetensors(directory_ / layout / "result.safetensors", sources, {{"layout", layout}});
}

void Dump::finish() {
  for (const auto& [place, tensors] : tensors_) {
    const auto& [layout, rank] = place;
    std::vector<TensorSource> sources;
    for (const auto& [name, tensor] : tensors) sources.push_back(tensor_source(name, tensor));
    std::filesystem::create_directories(directory_ / layout);
    write_safetensors(directory_ / layout / fmt::format("rank{}.safetensors", rank), sources,
                      {{"rank", std::to_string(rank)}, {"ranks", std::to_string(num_ranks_)}, {"layout", layout}});
  }
}

}  // namespace isomer
