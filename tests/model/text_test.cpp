#include "model/text.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/error.h"

namespace isomer {
namespace {

namespace fs = std::filesystem;

class TextFile : public ::testing::Test {
 protected:
  TextFile() { fs::create_directories(folder_); }
  ~TextFile() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& bytes) const {
    const fs::path path = folder_ / name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  const fs::path folder_ = fs::temp_directory_path() / ("isomer_text_test_" + std::to_string(getpid()));
};

std::string error_of(const std::string& path) {
  try {
    load_text_bytes(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(DefaultText, IsTheFileUnderData) {
  const std::string file = load_text_bytes(ISOMER_SOURCE_DIR "/data/text/pride-and-prejudice.txt");
  EXPECT_EQ(default_text().size(), 684768U);
  EXPECT_TRUE(default_text() == file);
}

TEST_F(TextFile, IsReadByteForByte) {
  const std::string bytes("a\r\n\0\xff\x80z\n", 8);
  EXPECT_EQ(load_text_bytes(write("bytes", bytes)), bytes);
}

TEST_F(TextFile, ErrorsNameThePathAndTheReason) {
  const std::string missing = folder_ / "missing";
  EXPECT_EQ(error_of(missing), "text file '" + missing + "': No such file or directory");
  EXPECT_EQ(error_of(folder_), "text file '" + folder_.string() + "': is a directory");
  const std::string empty = write("empty", "");
  EXPECT_EQ(error_of(empty), "text file '" + empty + "': is empty");
  EXPECT_EQ(error_of("/dev/null"), "text file '/dev/null': not a regular file");
  EXPECT_EQ(error_of(""), "text file '': No such file or directory");
}

TEST(ByteTokens, AreUnsignedBytes) {
  const std::string text("A\0\x7f\x80\xff", 5);
  EXPECT_EQ(byte_tokens(text, 5), (std::vector<std::int64_t>{65, 0, 127, 128, 255}));
}

TEST(ByteTokens, WrapAroundAndSaySo) {
  struct Case {
    std::size_t count;
    std::vector<std::int64_t> tokens;
    bool wrapped;
  };
  for (const Case& c : {Case{0, {}, false}, Case{1, {'a'}, false}, Case{3, {'a', 'b', 'c'}, false},
                        Case{4, {'a', 'b', 'c', 'a'}, true}, Case{7, {'a', 'b', 'c', 'a', 'b', 'c', 'a'}, true}}) {
    bool wrapped = !c.wrapped;
    EXPECT_EQ(byte_tokens("abc", c.count, &wrapped), c.tokens) << c.count;
    EXPECT_EQ(wrapped, c.wrapped) << c.count;
  }
}

TEST(ByteTokens, RefuseAnEmptyText) {
  EXPECT_THROW(byte_tokens("", 1), std::invalid_argument);
  EXPECT_TRUE(byte_tokens("", 0).empty());
}

}  // namespace
}  // namespace isomer
