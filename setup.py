"""Builds the native CPU kernels where there is a compiler; without one the package falls back to XLA.

Everything else about the package is in pyproject.toml.
"""

import concurrent.futures
import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("jaxllm/kernels/native")
FLAGS = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-fvisibility=hidden", "-pthread", "-Wno-psabi"]
X86 = platform.machine().lower() in ("x86_64", "amd64")
ARM = platform.machine().lower() in ("aarch64", "arm64")
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


class BuildKernels(build_ext):
    """Compiles each file with its own flags, and gives up quietly when that cannot be done."""

    def build_extension(self, ext: Extension) -> None:
        """Builds one extension, or none with a line that says why."""
        if os.environ.get("JAXLLM_NATIVE") == "0":
            print("JAXLLM_NATIVE=0: jaxllm is built without native kernels", file=sys.stderr)
            return
        try:
            self._build(ext)
        except Exception as error:
            if os.environ.get("JAXLLM_NATIVE") == "1":
                raise
            print(f"jaxllm is built without native kernels ({error})", file=sys.stderr)

    def _build(self, ext: Extension) -> None:
        import jaxlib

        include = [str(Path(jaxlib.__file__).parent / "include"), *self.compiler.include_dirs]
        sanitize = os.environ.get("JAXLLM_SANITIZE", "")
        extra = [f"-fsanitize={sanitize}", "-g", "-fno-omit-frame-pointer"] if sanitize else []

        def compiled(source: str) -> list[str]:
            flags = [*FLAGS, *extra, *self._accepted(INSTRUCTIONS.get(Path(source).stem, []))]
            return self.compiler.compile(
                [source], output_dir=self.build_temp, include_dirs=include, extra_postargs=flags,
                depends=ext.depends, macros=ext.define_macros,
            )  # fmt: skip

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [each for objects in pool.map(compiled, ext.sources) for each in objects]
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), extra_postargs=["-pthread", *extra], target_lang="c++"
        )

    def _accepted(self, flags: list[str]) -> list[str]:
        """The flags, or none of them for a compiler that is older than the instructions: that file is
        then empty."""
        if not flags:
            return flags
        probe = Path(self.build_temp) / f"probe{'_'.join(flags)}.cpp"
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("int main() { return 0; }\n")
        try:
            self.compiler.compile([str(probe)], output_dir=self.build_temp, extra_postargs=flags)
        except Exception:
            return []
        return flags


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
            optional=os.environ.get("JAXLLM_NATIVE") != "1",
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
