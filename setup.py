"""Builds the native CPU kernels where there is a compiler; without one the package falls back to XLA.

Everything else about the package is in pyproject.toml.
"""

import concurrent.futures
import json
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("jaxllm/kernels/native")
FLAGS = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-fvisibility=hidden", "-pthread", "-Wno-psabi"]
# What is built for: with a cross compiler not this machine. A Mac's Python may name two kinds at once.
TARGET = sysconfig.get_platform().split("-")[-1].lower()
MACHINE = platform.machine().lower() if TARGET.startswith("universal") else TARGET
X86 = MACHINE in ("x86_64", "amd64")
ARM = MACHINE in ("aarch64", "arm64")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
# A file per instruction set, each built for it alone; which of them runs is decided at run time.
INSTRUCTIONS: dict[str, list[str]] = {
    "backend_avx2": AVX2 if X86 else [],
    "backend_avxvnni": [*AVX2, "-mavxvnni"] if X86 else [],
    "backend_avx512": AVX512 if X86 else [],
    "backend_amx": [*AVX512, "-mamx-tile", "-mamx-int8"] if X86 else [],
    "backend_neon": ["-march=armv8.2-a+dotprod+fp16"] if ARM else [],
    "backend_i8mm": ["-march=armv8.2-a+dotprod+fp16+i8mm"] if ARM else [],
}
WANTED = os.environ.get("JAXLLM_NATIVE", "")
# Takes the library's place where it could not be built, so that `jaxllm info` has the reason.
NOT_BUILT = '''"""Says why there are no native kernels; setup.py wrote it."""

raise ImportError({reason!r})
'''


class BuildKernels(build_ext):
    """Compiles each file with its own flags. An instruction set that does not compile is left out; where
    anything else fails, there are no kernels. Both are said, and errors if JAXLLM_NATIVE is 1. If it is
    "host", only what this processor would choose is built, and the portable kernels."""

    def run(self) -> None:
        """Builds the library, or in place of one that could not be built, or an older one, writes why."""
        self.failure = ""
        super().run()
        for ext in self.extensions:
            library = Path(self.get_ext_fullpath(ext.name))
            note = library.with_name("_native.py")
            note.unlink(missing_ok=True)
            if self.failure:
                library.unlink(missing_ok=True)
                note.parent.mkdir(parents=True, exist_ok=True)
                note.write_text(NOT_BUILT.format(reason=f"they could not be built: {self.failure}"))

    def build_extension(self, ext: Extension) -> None:
        """Builds one extension, or none with a line that says why."""
        if WANTED == "0":
            print("JAXLLM_NATIVE=0: jaxllm is built without native kernels", file=sys.stderr)
            return
        try:
            self._build(ext)
        except Exception as error:
            if WANTED == "1":
                raise
            self.failure = str(error)
            # Else an older one would be copied from there to the sources.
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            print(f"jaxllm is built without native kernels ({error})", file=sys.stderr)

    def _build(self, ext: Extension) -> None:
        import jaxlib

        include = [str(Path(jaxlib.__file__).parent / "include"), *self.compiler.include_dirs]
        sanitize = os.environ.get("JAXLLM_SANITIZE", "")
        extra = [f"-fsanitize={sanitize}", "-g", "-fno-omit-frame-pointer"] if sanitize else []
        refused: dict[str, str] = {}
        absent: list[str] = []
        host = _host_instructions() if WANTED == "host" else ""
        # Versions of setuptools differ in what they call.
        self.compiler.spawn = self.compiler.call = _run

        def compiled(source: str, *flags: str) -> list[str]:
            return self.compiler.compile(
                [source], output_dir=self.build_temp, include_dirs=[str(NATIVE), *include],
                extra_postargs=[*FLAGS, *extra, *flags], depends=ext.depends, macros=ext.define_macros,
            )  # fmt: skip

        def compiled_or_left_out(source: str) -> list[str]:
            file = Path(source).stem
            flags, name = INSTRUCTIONS.get(file, []), file.removeprefix("backend_")
            if host and flags and file != host:
                refused[name] = "JAXLLM_NATIVE=host: only those of this processor are built"
                absent.append(name)
                return []
            try:
                return compiled(source, *flags)
            except CompileError as error:
                if WANTED == "1" or not flags:
                    raise
                refused[name] = str(error)
            try:
                # Empty, but for a compiler that refuses the flags and has the instructions by default.
                return compiled(source)
            except CompileError:
                absent.append(name)
                return []

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [each for objects in pool.map(compiled_or_left_out, ext.sources) for each in objects]
        for name, reason in refused.items():
            print(f"jaxllm is built without the native kernels for {name} ({reason})", file=sys.stderr)
        note = Path(self.build_temp) / "refused_backends.cpp"
        note.write_text(_refused_backends(refused, absent))
        objects += compiled(str(note))
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), extra_postargs=["-pthread", *extra], target_lang="c++"
        )


def _host_instructions() -> str:
    """The file in `INSTRUCTIONS` that this processor would choose; empty where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    line = next((each for each in text.splitlines() if each.startswith("flags")), "")
    # Such as avx512_vnni for -mavx512vnni.
    known = {each.replace("_", "") for each in line.split()}
    wanted = {file: {flag[2:].replace("-", "") for flag in flags} for file, flags in INSTRUCTIONS.items()}
    # The last ones are the fastest.
    return next((file for file in reversed(INSTRUCTIONS) if wanted[file] and wanted[file] <= known), "")


def _run(command: list[str], **_: object) -> None:
    """Runs a compiler or linker.

    Raises:
      CompileError: it is not there, or fails; the message is its first error.
    """
    target = sysconfig.get_config_var("MACOSX_DEPLOYMENT_TARGET")
    environment = ({"MACOSX_DEPLOYMENT_TARGET": str(target)} if target else {}) | dict(os.environ, LC_ALL="C")
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise CompileError(f"{command[0]}: {error.strerror}") from error
    sys.stderr.write(done.stdout + done.stderr)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines() or [f"{command[0]} ended with {done.returncode}"]
        raise CompileError(next((line for line in lines if "error" in line), lines[-1]))


def _refused_backends(refused: dict[str, str], absent: list[str]) -> str:
    """The C++ that says which instruction sets did not compile and why, in place of those that are absent."""

    def quoted(text: str) -> str:
        return json.dumps("".join(each if " " <= each <= "~" else "?" for each in text))

    pairs = [f"{{{quoted(name)}, {quoted(reason)}}}" for name, reason in sorted(refused.items())]
    return "\n".join((
        '#include "backend.h"',
        *(f"const jaxllm::Backend* const jaxllm::{name}_backend = nullptr;" for name in sorted(absent)),
        'extern "C" const char* const jaxllm_refused_backends[][2];',
        f"const char* const jaxllm_refused_backends[][2] = {{{', '.join([*pairs, '{nullptr, nullptr}'])}}};",
        "",
    ))  # fmt: skip


setup(
    ext_modules=[
        Extension(
            "jaxllm.kernels._native",
            sources=sorted(str(path) for path in NATIVE.glob("*.cpp")),
            depends=sorted(str(path) for path in (*NATIVE.glob("*.h"), *NATIVE.glob("*.inl"))),
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            language="c++",
            # Else an editable install without a compiler fails when it copies what was not built.
            optional=WANTED != "1",
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
