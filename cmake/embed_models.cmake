# Writes the descriptions in models/ into a C++ file, so that the program has them wherever it runs.
# Arguments: OUTPUT, FILES (separated by '|').
string(REPLACE "|" ";" files "${FILES}")
set(rows "")
foreach(file ${files})
  get_filename_component(name ${file} NAME)
  if(name STREQUAL "config.json") # models/NAME/config.json, which may have weights beside it
    get_filename_component(name ${file} DIRECTORY)
    get_filename_component(name ${name} NAME)
  endif()
  string(REGEX REPLACE "\\.json$" "" name "${name}")
  file(READ ${file} text)
  string(APPEND rows "      {\"${name}\", R\"isomer(${text})isomer\"},\n")
endforeach()
file(WRITE ${OUTPUT}.new "// Generated from models/*.json and models/*/config.json.
#include \"model/builtin_models.h\"

namespace isomer {

std::span<const BuiltinModel> builtin_models() {
  static constexpr BuiltinModel kModels[] = {
${rows}  };
  return kModels;
}

}  // namespace isomer
")
file(COPY_FILE ${OUTPUT}.new ${OUTPUT} ONLY_IF_DIFFERENT)
file(TOUCH ${OUTPUT})
