"""Makes stand-ins for the CUDA libraries that this environment's torch links to and does not have.

torch's build for GPUs does not load without these libraries, though nothing calls them where there is
no GPU. They take 3 GB. A stand-in has the names that torch links to; each function returns an error,
so torch finds no GPU. Needs a C compiler with its `ldd`, `nm` and `readelf`.
"""

import collections
import pathlib
import re
import subprocess
import sysconfig
import tempfile

LIBRARIES = pathlib.Path(sysconfig.get_path("purelib"), "torch", "lib")

# cudaErrorNoDevice. In the other libraries any number but 0 is an error too.
NO_DEVICE = 100

# Of these torch reads what they return as text.
TEXTS = ("GetErrorString", "GetErrorName", "GetStatusString", "GetLastErrorString")


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def missing():
    """The libraries that the dynamic linker does not find."""
    cuda = [str(path) for path in LIBRARIES.glob("lib*cuda*.so")]
    if not cuda:
        # There is no torch here, or its build for the CPU.
        return set()
    linked = [str(LIBRARIES / "libtorch_python.so"), *cuda]
    return set(re.findall(r"(\S+) => not found", run("ldd", *linked)))


def versions():
    """The symbol versions that torch needs of each library."""
    needed = collections.defaultdict(set)
    for path in LIBRARIES.glob("*.so*"):
        library = None
        for file, name in re.findall(r"File: (\S+)|Name: (\S+)", run("readelf", "-VW", path)):
            library = file or library
            if name:
                needed[library].add(name)
    return needed


def undefined():
    """The names that torch's libraries take from others, by their version."""
    names = collections.defaultdict(set)
    for path in LIBRARIES.glob("*.so*"):
        listed = run("nm", "--dynamic", "--undefined-only", path)
        for symbol in re.findall(r"^ +U (\S+)$", listed, re.MULTILINE):
            name, _, version = symbol.partition("@")
            names[version].add(name)
    return names


def make(library, needed, names):
    """Compiles one stand-in next to torch's own libraries."""
    stem = library.partition(".")[0].removeprefix("lib").lower()
    by_version = {version: names[version] for version in sorted(needed)}
    if not by_version:
        # A library without versions: its names begin with its own.
        by_version = {"": {name for name in names[""] if name.lower().startswith(stem)}}
    source, script = [], []
    for version, functions in by_version.items():
        for name in sorted(functions):
            text = name.endswith(TEXTS)
            value = '"there is no GPU"' if text else NO_DEVICE
            source.append(f"{'const char *' if text else 'long '}{name}(void) {{ return {value}; }}")
        if version:
            script.append(f'"{version}" {{ global: {"; ".join(sorted(functions))}; }};')
    with tempfile.TemporaryDirectory() as folder:
        code, exports = pathlib.Path(folder, "stand_in.c"), pathlib.Path(folder, "versions")
        code.write_text("\n".join(source) + "\n")
        exports.write_text("\n".join(script) + "\n")
        how = [f"-Wl,--version-script={exports}"] if script else []
        # Some names are those of functions that the compiler has its own idea of.
        how += ["-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,-soname,{library}"]
        run("cc", *how, "-o", LIBRARIES / library, code)


if __name__ == "__main__":
    lacking = missing()
    # A library that is not of CUDA is a defect of the environment, which its import tells.
    ours = sorted(name for name in lacking if re.match(r"lib(cu|nv|nccl)", name))
    if ours:
        needed, names = versions(), undefined()
        for library in ours:
            make(library, needed[library], names)
        print(f"stand-ins for {len(ours)} CUDA libraries: torch loads without them, and finds no GPU")
