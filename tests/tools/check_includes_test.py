import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_includes  # noqa: E402


class CheckIncludes(unittest.TestCase):
    def complaints(self, files):
        """What the check says of a tree of {path: text}."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            return check_includes.check(folder)

    def test_this_repository(self):
        self.assertEqual(check_includes.check(ROOT), [])

    def test_every_pair_of_layers(self):
        for above, layer in enumerate(check_includes.LAYERS[1:]):
            for below, target in enumerate(check_includes.LAYERS[1:]):
                found = self.complaints({f"src/{layer}/a.cpp": f'#include <vector>\n#include "{target}/b.h"\n'})
                allowed = below >= above and (layer, target) != ("plan", "kernels")
                self.assertEqual(len(found), 0 if allowed else 1, (layer, target, found))

    def test_names_file_line_and_both_layers(self):
        found = self.complaints({"src/kernels/cpu/a.cpp": '#include "core/a.h"\n\n  #  include "comm/communicator.h"\n'})
        self.assertEqual(found, ["src/kernels/cpu/a.cpp:3: kernels may not include comm, which stands above it "
                                 "(comm/communicator.h)"])

    def test_relative_paths_do_not_slip_through(self):
        found = self.complaints({"src/core/a.h": '#include "../comm/b.h"\n#include "c.h"\n', "src/comm/b.h": "",
                                 "src/core/c.h": ""})
        self.assertEqual(len(found), 1)
        self.assertTrue(found[0].startswith("src/core/a.h:1: core may not include comm"), found)

    def test_the_program_includes_anything_and_nothing_includes_it(self):
        self.assertEqual(self.complaints({"apps/isomer/a.cpp": '#include "kernels/a.h"\n#include "plan/b.h"\n'}), [])
        self.assertEqual(len(self.complaints({"src/plan/a.cpp": '#include "apps/isomer/a.h"\n'})), 1)

    def test_an_unknown_folder_is_reported(self):
        self.assertEqual(len(self.complaints({"src/utils/a.h": ""})), 1)

    def test_headers_from_elsewhere_are_ignored(self):
        self.assertEqual(self.complaints({"src/core/a.h": '#include "mpi.h"\n#include <dnnl.hpp>\n// #include "comm/a.h"\n'}),
                         [])


if __name__ == "__main__":
    unittest.main()
