# Writes the recordings in docs/data/ into a C++ file: `NAME.json` becomes embedded_recording("NAME").
# Arguments: OUTPUT, FILES (separated by '|').
string(REPLACE "|" ";" files "${FILES}")
set(rows "")
foreach(file ${files})
  get_filename_component(name ${file} NAME)
  string(REGEX REPLACE "\\.json$" "" name "${name}")
  file(READ ${file} text)
  string(APPEND rows "  if (name == \"${name}\") return R\"isomer(${text})isomer\";\n")
endforeach()
file(WRITE ${OUTPUT}.new "// Generated from docs/data/*.json.
#include \"study/recordings.h\"

namespace isomer {

std::string_view embedded_recording([[maybe_unused]] std::string_view name) {
${rows}  return {};
}

}  // namespace isomer
")
file(COPY_FILE ${OUTPUT}.new ${OUTPUT} ONLY_IF_DIFFERENT)
file(TOUCH ${OUTPUT})
