"""The wheel where nothing else is installed. unittest runs this: there is no pytest either."""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import unittest
from pathlib import Path


class EmptyEnvironment(unittest.TestCase):
    def test_there_is_nothing_but_the_wheel(self):
        for package in ("torch", "numpy", "ml_dtypes", "tensordict", "pytest"):
            self.assertIsNone(importlib.util.find_spec(package), package)
        installed = {one.metadata["Name"] for one in importlib.metadata.distributions()}
        self.assertEqual(installed, {"weightsync"})

    def test_the_package_loads_and_has_its_types(self):
        import weightsync
        import weightsync._native as native

        folder = Path(weightsync.__file__).parent
        self.assertTrue(folder.is_relative_to(sys.prefix), folder)
        for name in ("py.typed", "_native.pyi"):
            self.assertTrue((folder / name).is_file(), name)
        # One for every CPython from 3.11 on, and it finds the interpreter's own symbols.
        self.assertTrue(native.__file__.endswith(".abi3.so"), native.__file__)
        self.assertNotIn(b"libpython", Path(native.__file__).read_bytes())

    def test_the_tests_are_not_in_the_wheel(self):
        files = importlib.metadata.files("weightsync")
        tests = [str(file) for file in files if "tests" in file.parts]
        self.assertEqual(tests, [])

    def test_the_doctor_finds_the_local_schemes_working(self):
        command = [sys.executable, "-I", "-m", "weightsync", "doctor", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        report = json.loads(done.stdout)
        self.assertTrue(report["works"])
        self.assertEqual(report["facts"]["packages"], {})
        self.assertIsNone(report["facts"]["native"])


if __name__ == "__main__":
    unittest.main()
