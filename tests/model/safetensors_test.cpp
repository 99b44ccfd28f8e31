#include "model/safetensors.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/error.h"
#include "model/checkpoint.h"
#include "model/temp_folder.h"
#include "model/weights.h"

namespace isomer {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

std::vector<double> values_of(const Tensor& tensor) {
  if (tensor.dim() > 1) {
    std::vector<double> all;
    for (std::int64_t i = 0; i < tensor.size(0); ++i) {
      const auto part = values_of(tensor.select(0, i));
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }
  std::vector<double> values;
  visit_dtype(tensor.dtype(), [&]<class T>() {
    const auto stride = tensor.dim() == 0 ? 1 : tensor.stride(0);
    for (std::int64_t i = 0; i < tensor.numel(); ++i)
      values.push_back(static_cast<double>(tensor.data<T>()[i * stride]));
  });
  return values;
}

/// fn() throws isomer::Error whose text has all of `parts`.
template <class Fn>
void expect_error(Fn&& fn, const std::vector<std::string>& parts) {
  try {
    fn();
    ADD_FAILURE() << "accepted; expected: " << parts.front();
  } catch (const Error& error) {
    for (const auto& part : parts) EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

std::string one(std::string_view dtype, std::string_view shape, std::int64_t begin, std::int64_t end) {
  return fmt::format(R"({{"t":{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}}}})", dtype, shape, begin, end);
}

TEST(Safetensors, RoundTripsEveryDType) {
  const TempFolder folder;
  const auto path = folder.path() / "x.safetensors";
  std::vector<TensorSource> sources;
  std::map<std::string, Tensor> tensors;
  for (const auto dtype : {DType::f32, DType::bf16, DType::f64}) {
    for (const Shape& shape : {Shape{}, Shape{0}, Shape{1}, Shape{7}, Shape{3, 5}, Shape{0, 4}, Shape{2, 3, 4}}) {
      const auto name = fmt::format("{}.{}", name_of(dtype), to_string(shape));
      tensors[name] = seeded_tensor(1, name, shape, dtype);
      sources.push_back(tensor_source(name, tensors[name]));
    }
  }
  write_safetensors(path, sources, {{"seed", "1"}, {"quote\"", "ünïcode"}});
  const auto checkpoint = Checkpoint::open(path);
  EXPECT_EQ(checkpoint.names().size(), sources.size());
  EXPECT_EQ(checkpoint.metadata().at("quote\""), "ünïcode");
  EXPECT_EQ(checkpoint.metadata().at("format"), "pt");
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(checkpoint.info(name).shape, tensor.shape());
    for (const auto dtype : {DType::f32, DType::bf16, DType::f64}) {
      const auto read = checkpoint.read(name, dtype);
      EXPECT_EQ(read.shape(), tensor.shape());
      if (dtype == tensor.dtype() || dtype == DType::f64) {
        EXPECT_EQ(values_of(read), values_of(tensor)) << name;
      }
    }
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1);  // no temporary file stays
}

TEST(Safetensors, ConvertsWithOneRounding) {
  const TempFolder folder;
  const auto source = seeded_tensor(2, "w", {300}, DType::f32);
  write_safetensors(folder.path() / "x.safetensors", {tensor_source("w", source)});
  const auto read = Checkpoint::open(folder.path() / "x.safetensors").read("w", DType::bf16);
  for (int i = 0; i < 300; ++i) EXPECT_EQ(read.data<bf16>()[i].bits, bf16(source.data<float>()[i]).bits);
}

TEST(Safetensors, ReadsSlicesWithoutTheRest) {
  const TempFolder folder;
  const auto source = seeded_tensor(3, "w", {5, 7}, DType::f32);
  write_safetensors(folder.path() / "x.safetensors", {tensor_source("w", source)});
  const auto checkpoint = Checkpoint::open(folder.path() / "x.safetensors");
  for (const auto dtype : {DType::f32, DType::bf16, DType::f64}) {
    const auto whole = checkpoint.read("w", dtype);
    for (std::int64_t r = 0; r <= 5; ++r) {
      for (std::int64_t c = 0; c <= 7; ++c) {
        const auto part =
            checkpoint.read("w", dtype, {.rows = {.begin = r}, .columns = {.begin = c, .length = (7 - c) / 2}});
        EXPECT_EQ(part.shape(), (Shape{5 - r, (7 - c) / 2}));
        EXPECT_EQ(values_of(part), values_of(whole.slice(0, r, 5 - r).slice(1, c, (7 - c) / 2)));
      }
    }
  }
  const std::vector<std::int64_t> ids{4, 0, 4};
  const auto rows = checkpoint.read_rows("w", ids, DType::f64);
  EXPECT_EQ(values_of(rows.select(0, 2)), values_of(checkpoint.read("w", DType::f64).select(0, 4)));
  expect_error([&] { checkpoint.read("w", DType::f32, {.rows = {.begin = 6}}); }, {"'w': rows 6", "[5, 7]"});
  expect_error([&] { checkpoint.read("w", DType::f32, {.rows = {.begin = 2, .length = 4}}); }, {"rows 2 to 6"});
  expect_error([&] { checkpoint.read("w", DType::f32, {.columns = {.begin = -1, .length = 1}}); }, {"columns -1"});
  const std::vector<std::int64_t> outside{5};
  expect_error([&] { checkpoint.read_rows("w", outside, DType::f32); }, {"rows 5 to 6"});
  expect_error([&] { checkpoint.read("v", DType::f32); }, {"no tensor 'v'"});
}

TEST(Safetensors, ViewsAlignedDataWithoutACopy) {
  const TempFolder folder;
  write_safetensors(folder.path() / "x.safetensors", {tensor_source("w", seeded_tensor(3, "w", {4, 4}, DType::f32))});
  Tensor view;
  {
    const auto checkpoint = Checkpoint::open(folder.path() / "x.safetensors");
    view = checkpoint.read("w", DType::f32);
    EXPECT_EQ(view.raw(), checkpoint.read("w", DType::f32).raw());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.raw()) % 64, 0u);
    EXPECT_NE(checkpoint.read("w", DType::f64).raw(), checkpoint.read("w", DType::f64).raw());
  }
  EXPECT_EQ(values_of(view).size(), 16u);  // the mapping outlives the checkpoint
}

TEST(Safetensors, ReadsUnalignedData) {
  const TempFolder folder;
  std::string header = one("F32", "[2]", 0, 8);
  if ((8 + header.size()) % 4 == 0) header += ' ';
  const float data[] = {1.5f, -2.f};
  const auto path = folder.write("x.safetensors",
                                 safetensors_bytes(header, std::string_view(reinterpret_cast<const char*>(data), 8)));
  EXPECT_EQ(values_of(Checkpoint::open(path).read("t", DType::f32)), (std::vector<double>{1.5, -2}));
}

TEST(Safetensors, ReadsHalves) {
  const TempFolder folder;
  const std::uint16_t data[] = {0x3c00, 0xc000, 0x7bff, 0x0001, 0x83ff, 0x0400, 0x7c00, 0xfc00, 0x7e00, 0x8000};
  const auto path = folder.write(
      "x.safetensors",
      safetensors_bytes(one("F16", "[10]", 0, 20), std::string_view(reinterpret_cast<const char*>(data), 20)));
  const auto v = values_of(Checkpoint::open(path).read("t", DType::f32));
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_THAT(std::vector<double>(v.begin(), v.begin() + 8),
              testing::ElementsAre(1, -2, 65504, 0x1p-24, -1023 * 0x1p-24, 0x1p-14, infinity, -infinity));
  EXPECT_TRUE(std::isnan(v[8]));
  EXPECT_TRUE(v[9] == 0 && std::signbit(v[9]));
}

TEST(Safetensors, KnowsEveryE4M3) {
  EXPECT_EQ(e4m3_to_float(0x00), 0.f);
  EXPECT_EQ(e4m3_to_float(0x01), 0x1p-9f);
  EXPECT_EQ(e4m3_to_float(0x08), 0x1p-6f);
  EXPECT_EQ(e4m3_to_float(0x38), 1.f);
  EXPECT_EQ(e4m3_to_float(0xb8), -1.f);
  EXPECT_EQ(e4m3_to_float(0x7e), 448.f);
  EXPECT_TRUE(std::isnan(e4m3_to_float(0x7f)) && std::isnan(e4m3_to_float(0xff)));
  for (int bits = 1; bits < 0x7f; ++bits)
    EXPECT_LT(e4m3_to_float(static_cast<std::uint8_t>(bits - 1)), e4m3_to_float(static_cast<std::uint8_t>(bits)));
}

/// An FP8 matrix of 130 × 257: the last blocks of rows and columns are partial.
struct Fp8File {
  static constexpr std::int64_t kRows = 130, kColumns = 257, kBlockColumns = 3;
  std::string weights, scales;
  Fp8File() : weights(kRows * kColumns, '\0'), scales(2 * kBlockColumns * 4, '\0') {
    for (std::size_t i = 0; i < weights.size(); ++i)
      weights[i] = static_cast<char>(i * 37 % 127 | (i % 3 == 0 ? 0x80 : 0));
    for (std::size_t i = 0; i < 6; ++i) {
      const float scale = 0.37f * static_cast<float>(i + 1);
      std::memcpy(scales.data() + 4 * i, &scale, 4);
    }
  }
  double value(std::int64_t row, std::int64_t column) const {
    const auto byte = static_cast<std::uint8_t>(weights[static_cast<std::size_t>(row * kColumns + column)]);
    const float scale = 0.37f * static_cast<float>(row / 128 * kBlockColumns + column / 128 + 1);
    return static_cast<double>(e4m3_to_float(byte)) * static_cast<double>(scale);
  }
  std::string bytes(std::string_view scale_dtype = "F32", std::string_view scale_shape = "[2,3]") const {
    return safetensors_bytes(fmt::format(R"({{"w":{{"dtype":"F8_E4M3","shape":[130,257],"data_offsets":[24,33434]}},)"
                                         R"("w_scale_inv":{{"dtype":"{}","shape":{},"data_offsets":[0,24]}}}})",
                                         scale_dtype, scale_shape),
                             scales + weights);
  }
};

TEST(Safetensors, ScalesFp8Blocks) {
  const TempFolder folder;
  const Fp8File file;
  const auto checkpoint = Checkpoint::open(folder.write("x.safetensors", file.bytes()));
  const auto whole = checkpoint.read("w", DType::f64);
  for (std::int64_t r = 0; r < 130; ++r)
    for (std::int64_t c = 0; c < 257; ++c)
      ASSERT_EQ(whole.data<double>()[r * 257 + c], file.value(r, c)) << r << " " << c;
  const auto part =
      checkpoint.read("w", DType::f32, {.rows = {.begin = 126, .length = 4}, .columns = {.begin = 100, .length = 157}});
  for (std::int64_t r = 0; r < 4; ++r)
    for (std::int64_t c = 0; c < 157; ++c)
      ASSERT_EQ(part.data<float>()[r * 157 + c], static_cast<float>(file.value(126 + r, 100 + c)));
}

TEST(Safetensors, RefusesFp8WithoutItsScales) {
  const TempFolder folder;
  const Fp8File file;
  const auto read = [&](const std::string& bytes) {
    Checkpoint::open(folder.write("x.safetensors", bytes)).read("w", DType::f32);
  };
  expect_error([&] { read(file.bytes("F32", "[3,2]")); }, {"w_scale_inv is F32 [3, 2]: expected F32 [2, 3]"});
  expect_error([&] { read(file.bytes("I32", "[2,3]")); }, {"w_scale_inv is I32"});
  expect_error([&] { read(safetensors_bytes(R"({"w":{"dtype":"F8_E4M3","shape":[1,1],"data_offsets":[0,1]}})", "8")); },
               {"tensor 'w': FP8 without w_scale_inv"});
}

TEST(Safetensors, ListsIntegersAndRefusesToConvertThem) {
  const TempFolder folder;
  const auto path = folder.write("x.safetensors", safetensors_bytes(one("I64", "[1]", 0, 8), "12345678"));
  const auto checkpoint = Checkpoint::open(path);
  EXPECT_EQ(checkpoint.info("t").dtype, FileDType::i64);
  expect_error([&] { checkpoint.read("t", DType::f32); }, {"tensor 't': I64 can't be converted"});
}

struct BadFile {
  std::string bytes;
  std::vector<std::string> complaint;
};

TEST(Safetensors, RefusesEveryMalformedFile) {
  const std::string good = one("F32", "[2]", 0, 8);
  const auto length = [](std::uint64_t n, std::string_view rest) {
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &n, 8);
    return bytes + std::string(rest);
  };
  const std::string two =
      R"({{"a":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}},"b":{{"dtype":"{}","shape":[2],"data_offsets":[{},{}]}}}})";
  const auto pair = [&](std::string_view dtype, int begin, int end) {
    return fmt::format(fmt::runtime(two), dtype, begin, end);
  };
  const std::string data8(8, 'x'), data16(16, 'x'), data24(24, 'x');
  const std::vector<BadFile> files{
      {"", {"at byte 0", "too short"}},
      {"1234567", {"at byte 0", "too short"}},
      {length(100, "{}"), {"at byte 0: header length 100: expected at most 2"}},
      {length(std::uint64_t{1} << 63, "{}"), {"at byte 0: header length 9223372036854775808"}},
      {length(~std::uint64_t{0}, "{}"), {"header length 18446744073709551615"}},
      {length(200'000'000, "{}"), {"header length 200000000"}},
      {safetensors_bytes("", ""), {"at byte 8"}},
      {safetensors_bytes("[]", ""), {"at byte 8: the header is an array"}},
      {safetensors_bytes("{\"t\":", ""), {"at byte 13"}},
      {safetensors_bytes(std::string(5000, '['), ""), {"nested more than 64 deep"}},
      {safetensors_bytes("{\"\xff\xfe\":1}", ""), {"at byte 11", "UTF-8"}},
      {safetensors_bytes(R"({"t":3})", ""), {"at byte 9: 't': 3: expected an object"}},
      {safetensors_bytes(R"({"":{}})", ""), {"without a name"}},
      {safetensors_bytes(R"({"__metadata__":{"a":1}})", ""), {"__metadata__", "expected a string"}},
      {safetensors_bytes(R"({"__metadata__":[]})", ""), {"__metadata__", "expected an object"}},
      {safetensors_bytes(good, data8.substr(1)), {"at byte 9: 't': its data end at 8: the file has 7"}},
      {safetensors_bytes(good, data8 + "y"), {fmt::format("at byte {}: 1 bytes after the last", 16 + good.size())}},
      {safetensors_bytes("{}", "x"), {"1 bytes after the last"}},
      {safetensors_bytes(one("F33", "[2]", 0, 8), data8), {"dtype = \"F33\": expected F64"}},
      {safetensors_bytes(one("F32", "[3]", 0, 8), data8), {"8 bytes of data: shape [3] of F32 takes 12"}},
      {safetensors_bytes(one("F32", "[-2]", 0, 8), data8), {"shape[0] = -2"}},
      {safetensors_bytes(one("F32", "[2.0]", 0, 8), data8), {"shape[0] = 2.0"}},
      {safetensors_bytes(one("F32", "2", 0, 8), data8), {"shape = 2: expected an array"}},
      {safetensors_bytes(one("F32", "[4611686018427387904,4,2]", 0, 8), data8), {"overflow"}},
      {safetensors_bytes(one("F32", "[0,4611686018427387904,8]", 0, 0), ""), {"overflow"}},
      {safetensors_bytes(one("F32", "[18446744073709551615]", 0, 8), data8), {"shape[0] = 18446744073709551615"}},
      {safetensors_bytes(one("F32", "[1,1,1,1,1,1,1,1,2]", 0, 8), data8), {"up to 8 sizes"}},
      {safetensors_bytes(one("F32", "[2]", 8, 0), data8), {"data_offsets: expected [begin, end]"}},
      {safetensors_bytes(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", data8), {"data_offsets"}},
      {safetensors_bytes(R"({"t":{"dtype":"F32","shape":[2]}})", data8), {"data_offsets is missing"}},
      {safetensors_bytes(R"({"t":{"shape":[2],"data_offsets":[0,8]}})", data8), {"dtype is missing"}},
      {safetensors_bytes(pair("F32", 4, 12), data16), {"the data of 'b' overlap"}},
      {safetensors_bytes(pair("F32", 0, 8), data8), {"overlap"}},
      {safetensors_bytes(pair("F32", 16, 24), data24), {"the data of 'b' leave a hole"}},
      {safetensors_bytes(pair("F64", 12, 28), std::string(28, 'x')),
       {"'b': its data begin at 12: expected a multiple of 8"}},
      {safetensors_bytes(
           R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
           "xy"),
       {"duplicate key \"t\""}},
      {safetensors_bytes(R"({"t":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", "x"),
       {"duplicate key \"dtype\""}},
  };
  const TempFolder folder;
  for (const auto& [bytes, complaint] : files) {
    const auto path = folder.write("bad.safetensors", bytes);
    auto parts = complaint;
    parts.push_back(path.string());
    expect_error([&] { Checkpoint::open(path); }, parts);
  }
}

TEST(Safetensors, RefusesEveryTruncation) {
  const TempFolder folder;
  write_safetensors(folder.path() / "x.safetensors", {tensor_source("w", seeded_tensor(3, "w", {3}, DType::f32))});
  std::ifstream file(folder.path() / "x.safetensors", std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const auto path = folder.write("cut.safetensors", bytes.substr(0, size));
    EXPECT_THROW(Checkpoint::open(path), Error) << size;
  }
}

TEST(Safetensors, RefusesWhatIsNoFile) {
  const TempFolder folder;
  expect_error([&] { Checkpoint::open(folder.path() / "absent.safetensors"); }, {"absent.safetensors: No such file"});
  expect_error([&] { Checkpoint::open(folder.path()); }, {"neither model.safetensors nor"});
  expect_error([&] { Checkpoint::open("/dev/zero"); }, {"/dev/zero: not a file"});
}

TEST(Safetensors, SeesAFileThatShrinks) {
  const TempFolder folder;
  const auto path = folder.path() / "x.safetensors";
  write_safetensors(path, {tensor_source("w", seeded_tensor(3, "w", {1000}, DType::f32))});
  const auto checkpoint = Checkpoint::open(path);
  fs::resize_file(path, 100);
  expect_error([&] { checkpoint.read("w", DType::bf16); }, {"at byte 100", "has become shorter"});
}

TEST(Safetensors, RefusesToWriteNonsense) {
  const TempFolder folder;
  const auto path = folder.path() / "x.safetensors";
  const auto tensor = seeded_tensor(1, "w", {2}, DType::f32);
  const auto write = [&](std::vector<TensorSource> tensors) { write_safetensors(path, tensors); };
  EXPECT_THROW(write({tensor_source("w", tensor), tensor_source("w", tensor)}), std::invalid_argument);
  EXPECT_THROW(write({tensor_source("", tensor)}), std::invalid_argument);
  EXPECT_THROW(write({tensor_source("__metadata__", tensor)}), std::invalid_argument);
  EXPECT_THROW(write({tensor_source("\xff", tensor)}), std::invalid_argument);
  EXPECT_THROW(write({tensor_source("w", seeded_tensor(1, "w", {2}, DType::f32, 1, true))}), CheckFailure);
  EXPECT_THROW(write_safetensors(folder.path() / "no" / "x", {}), Error);
  EXPECT_TRUE(fs::is_empty(folder.path()));  // nothing half written stays
}

TEST(Safetensors, WritesStridedViewsInOrder) {
  const TempFolder folder;
  const auto tensor = seeded_tensor(1, "w", {3, 4}, DType::f32);
  write_safetensors(folder.path() / "x.safetensors", {tensor_source("w", tensor.transpose(0, 1))});
  const auto read = Checkpoint::open(folder.path() / "x.safetensors").read("w", DType::f32);
  EXPECT_EQ(read.shape(), (Shape{4, 3}));
  EXPECT_EQ(values_of(read), values_of(tensor.transpose(0, 1)));
}

class Shards : public testing::Test {
 protected:
  void SetUp() override {
    std::vector<TensorSource> sources;
    for (int i = 0; i < 5; ++i) {
      const auto name = fmt::format("t{}", i);
      sources.push_back(tensor_source(name, seeded_tensor(1, name, {4, 4}, DType::f32)));
    }
    write_checkpoint(folder_.path(), sources, 128);
    index_ = folder_.path() / "model.safetensors.index.json";
  }
  void write_index(std::string_view weight_map) { folder_.write(index_.filename().string(), weight_map); }
  std::string index_with(std::string_view last) const {
    return fmt::format(
        R"({{"weight_map":{{"t0":"model-00001-of-00003.safetensors","t1":"model-00001-of-00003.safetensors",)"
        R"("t2":"model-00002-of-00003.safetensors","t3":"model-00002-of-00003.safetensors"{}}}}})",
        last);
  }
  TempFolder folder_;
  fs::path index_;
};

TEST_F(Shards, RoundTrip) {
  for (const auto& path : {folder_.path(), index_}) {
    const auto checkpoint = Checkpoint::open(path);
    EXPECT_EQ(checkpoint.names().size(), 5u);
    EXPECT_EQ(checkpoint.file_of("t4").filename(), "model-00003-of-00003.safetensors");
    for (int i = 0; i < 5; ++i) {
      const auto name = fmt::format("t{}", i);
      EXPECT_EQ(values_of(checkpoint.read(name, DType::f32)), values_of(seeded_tensor(1, name, {4, 4}, DType::f32)));
    }
  }
}

TEST_F(Shards, MissingShard) {
  fs::remove(folder_.path() / "model-00002-of-00003.safetensors");
  expect_error([&] { Checkpoint::open(folder_.path()); }, {index_.string(), "model-00002-of-00003", "No such file"});
}

TEST_F(Shards, ShardMissingFromTheIndex) {
  write_index(index_with(""));
  expect_error([&] { Checkpoint::open(folder_.path()); }, {"model-00003-of-00003.safetensors", "missing from it"});
}

TEST_F(Shards, TensorInTheIndexAndInNoShard) {
  write_index(index_with(R"(,"t4":"model-00003-of-00003.safetensors","t5":"model-00003-of-00003.safetensors")"));
  expect_error([&] { Checkpoint::open(folder_.path()); }, {index_.string(), "'t5' is not in model-00003"});
}

TEST_F(Shards, TensorInAShardAndNotInTheIndex) {
  write_index(index_with(R"(,"other":"model-00003-of-00003.safetensors")"));
  expect_error([&] { Checkpoint::open(folder_.path()); }, {"'t4'", "puts it nowhere"});
}

TEST_F(Shards, TensorInAnotherShard) {
  write_index(index_with(R"(,"t4":"model-00001-of-00003.safetensors","t5":"model-00003-of-00003.safetensors")"));
  expect_error([&] { Checkpoint::open(folder_.path()); }, {"'t4'", "puts it into model-00001"});
}

TEST_F(Shards, FilesOutsideTheDirectory) {
  for (const auto* name :
       {"../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\\\\b", "a\\u0000b"}) {
    write_index(index_with(fmt::format(",\"t4\":\"{}\"", name)));
    expect_error([&] { Checkpoint::open(folder_.path()); }, {"'t4'", "a file in the same directory", "at byte"});
  }
}

TEST_F(Shards, LinksOutOfTheDirectory) {
  const TempFolder elsewhere;
  const auto shard = folder_.path() / "model-00003-of-00003.safetensors";
  fs::rename(shard, elsewhere.path() / "blob");
  fs::create_symlink(elsewhere.path() / "blob", shard);
  expect_error([&] { Checkpoint::open(folder_.path()); }, {"is a link to", "expected a file inside"});
}

TEST_F(Shards, LinksInsideACache) {
  const TempFolder cache;
  const auto snapshot = cache.path() / "snapshots" / "0123";
  fs::create_directories(snapshot);
  fs::create_directories(cache.path() / "blobs");
  for (const auto& item : fs::directory_iterator(folder_.path())) {
    fs::copy(item.path(), cache.path() / "blobs" / item.path().filename());
    fs::create_symlink(fs::path("../../blobs") / item.path().filename(), snapshot / item.path().filename());
  }
  EXPECT_EQ(Checkpoint::open(snapshot).names().size(), 5u);
}

TEST_F(Shards, MalformedIndexes) {
  for (const auto& [text, complaint] : std::vector<std::pair<std::string, std::string>>{
           {"", "at byte 0"},
           {"[]", "expected an object with an object weight_map"},
           {"{}", "expected an object with an object weight_map"},
           {R"({"weight_map":[]})", "expected an object with an object weight_map"},
           {R"({"weight_map":{}})", "weight_map is empty"},
           {R"({"weight_map":{"a":1}})", "'a' = 1: expected the name of a file"},
           {R"({"weight_map":{"a":"x","a":"y"}})", "duplicate key \"a\""},
           {R"({"weight_map":)" + std::string(1000, '['), "nested more than"},
           {"{\"weight_map\":{\"a\":\"\xc3\x28\"}}", "at byte 22"},
       }) {
    write_index(text);
    expect_error([&] { Checkpoint::open(folder_.path()); }, {index_.string(), complaint});
  }
}

TEST_F(Shards, WriterRefusesToMixCheckpoints) {
  const std::vector<TensorSource> sources{tensor_source("w", seeded_tensor(1, "w", {1}, DType::f32))};
  EXPECT_THROW(write_checkpoint(folder_.path(), sources, 1 << 20), std::invalid_argument);
  const TempFolder fresh;
  write_checkpoint(fresh.path() / "new", sources, 1 << 20);
  write_checkpoint(fresh.path() / "new", sources, 1 << 20);  // over itself
  EXPECT_TRUE(fs::exists(fresh.path() / "new" / "model.safetensors"));
}

/// A checkpoint of one layer of seeded weights.
class MlaCheckpoint : public testing::Test {
 protected:
  static constexpr auto kNorm = "model.layers.1.self_attn.kv_a_layernorm.weight";
  Checkpoint write(const AttentionWeights& weights) {
    std::vector<TensorSource> sources;
    weights.for_each([&](std::string_view name, const Tensor& tensor) {
      sources.push_back(tensor_source(fmt::format("model.layers.1.{}", name), tensor));
    });
    sources.push_back(tensor_source("model.embed_tokens.weight", embedding_));
    write_safetensors(folder_.path() / "model.safetensors", sources);
    return Checkpoint::open(folder_.path());
  }
  ModelConfig config_ = load_model_config("tiny-mla");
  Tensor embedding_ = seeded_tensor(1, "e", {2048, 256}, DType::bf16);
  TempFolder folder_;
};

TEST_F(MlaCheckpoint, LoadsWhatWasWritten) {
  for (const bool bias : {false, true}) {
    for (const bool norm : {false, true}) {
      config_.attention_bias = bias;
      config_.kv_a_layernorm = norm;
      const auto seeded = seeded_attention_weights(config_, 1, DType::bf16, false, 1);
      const auto checkpoint = write(seeded);
      config_.attention_bias = false;  // the tensors decide
      auto loaded = load_attention_weights(checkpoint, config_, 1, DType::f32);
      std::map<std::string, std::vector<double>, std::less<>> values;
      loaded.for_each([&](std::string_view name, const Tensor& tensor) { values.emplace(name, values_of(tensor)); });
      std::size_t count = 0;
      seeded.for_each([&](std::string_view name, const Tensor& tensor) {
        EXPECT_EQ(values[std::string(name)], values_of(tensor)) << name;
        ++count;
      });
      EXPECT_EQ(values.size(), count);
    }
  }
}

TEST_F(MlaCheckpoint, SaysWhatIsWrong) {
  const auto seeded = seeded_attention_weights(config_, 1, DType::bf16, false, 1);
  auto weights = seeded;
  weights.kv_a_layernorm = Tensor();
  auto checkpoint = write(weights);
  expect_error([&] { load_attention_weights(checkpoint, config_, 1, DType::f32); },
               {kNorm, "is missing", "\"kv_a_layernorm\": false"});
  checkpoint = write(seeded);
  config_.kv_a_layernorm = false;
  expect_error([&] { load_attention_weights(checkpoint, config_, 1, DType::f32); }, {kNorm, "is there and"});
  config_.kv_a_layernorm = true;
  config_.v_head_dim = 33;
  expect_error([&] { load_attention_weights(checkpoint, config_, 1, DType::f32); },
               {"kv_b_proj.weight' has shape [1024, 64]: the configuration makes it [1040, 64]"});
  config_.v_head_dim = 32;
  config_.q_lora_rank = 0;
  expect_error([&] { load_attention_weights(checkpoint, config_, 1, DType::f32); }, {"q_proj.weight' is missing"});
  EXPECT_THROW(load_attention_weights(checkpoint, config_, 3, DType::f32), std::invalid_argument);
}

TEST_F(MlaCheckpoint, ReadsEmbeddingRows) {
  const auto checkpoint = write(seeded_attention_weights(config_, 1, DType::bf16, false, 1));
  const std::vector<std::int64_t> ids{2047, 5, 5}, outside{2048};
  const auto rows = load_embedding_rows(checkpoint, config_, ids, DType::f32);
  EXPECT_EQ(values_of(rows.select(0, 0)), values_of(embedding_.select(0, 2047)));
  EXPECT_EQ(values_of(rows.select(0, 2)), values_of(embedding_.select(0, 5)));
  EXPECT_THROW(load_embedding_rows(checkpoint, config_, outside, DType::f32), std::invalid_argument);
  config_.vocab_size = 1000;
  expect_error([&] { load_embedding_rows(checkpoint, config_, ids, DType::f32); }, {"has shape [2048, 256]"});
}

}  // namespace
}  // namespace isomer
