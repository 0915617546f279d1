"""The wheel where nothing else is installed. unittest runs this: there is no pytest either."""

import importlib.metadata
import importlib.util
import json
import pickle
import subprocess
import sys
import unittest
from pathlib import Path


#: A worker: prints the number and the digest of each version it gets.
WORKER = """
import pickle, sys, weightsync

receiver = weightsync.Receiver(pickle.load(sys.stdin.buffer), 0)
receiver.connect(timeout=20)
for _ in range(2):
    weights = receiver.receive(timeout=20)
    print(weights.version, weights.digest(), flush=True)
"""


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

    def test_versions_reach_another_process(self):
        import weightsync

        # Without numpy and torch there are no tensors, but plain data travels the same way.
        sender = weightsync.Sender({"__extra_state__": {"step": 1}}, timeout=20)
        command = [sys.executable, "-I", "-c", WORKER]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe) as worker:
            try:
                worker.stdin.write(pickle.dumps(sender.init_info))
                worker.stdin.close()
                sender.connect(1, timeout=20)
                seen = [worker.stdout.readline().split()]
                expected = [[b"1", sender.digest().encode()]]
                sender.send({"__extra_state__": {"step": 2}}, wait="sent")
                seen.append(worker.stdout.readline().split())
                expected.append([b"2", sender.digest().encode()])
                sender.shutdown()
            finally:
                worker.kill()
        self.assertEqual(seen, expected)
        self.assertNotEqual(*(digest for _, digest in seen))

    def test_the_command_measures_with_workers_of_its_own(self):
        case = ["--size=64KiB", "--tensors=4", "--readers=2", "--rounds=3", "--json"]
        script = [Path(sys.prefix, "bin", "weightsync")]
        for command in (script, [sys.executable, "-I", "-m", "weightsync"]):
            done = subprocess.run(
                [*command, "bench", "shared-mem", *case], capture_output=True, text=True, timeout=60
            )
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(json.loads(done.stdout)["readers"], 2)

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
