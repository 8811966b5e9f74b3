"""Models on LiteRT's accelerators, each in a process that finds its driver.

`python -m tests.export.compiled MODEL TOKENS PROMPT` prints, as JSON, whether the GPU alone runs all of a
model that takes masks, and what it and the CPU answer.
"""

import json
import os
import re
import subprocess
import sys

import numpy as np

DTYPES = {"int32": np.int32, "float32": np.float32, "float16": np.float16, "int8": np.int8, "bool": np.bool_}


def ran(models, name, given):
    """The results of a signature by name."""
    model = models[name]
    facts = model.get_signature_list()[name]
    inputs, outputs = {}, {}
    for each in facts["inputs"]:
        inputs[each] = model.create_input_buffer_by_name(name, each)
        inputs[each].write(np.ascontiguousarray(given[each]))
    details = model.get_output_tensor_details(name)
    for each in facts["outputs"]:
        outputs[each] = model.create_output_buffer_by_name(name, each)
    model.run_by_name(name, inputs, outputs)
    found = {}
    for each, buffer in outputs.items():
        shape, dtype = tuple(details[each]["shape"]), details[each]["dtype"]
        found[each] = np.array(buffer.read(int(np.prod(shape)), DTYPES[np.dtype(dtype).name])).reshape(shape)
    return found


def on_gpu(folder, place, *words):
    """The JSON that a command prints last; `folder` has SwiftShader's library and Vulkan's loader."""
    driver = {"library_path": f"{folder}/libvk_swiftshader.so", "api_version": "1.0.5"}
    icd = place / "driver.json"
    icd.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": driver}))
    found = {"VK_ICD_FILENAMES": str(icd), "VK_DRIVER_FILES": str(icd), "XDG_RUNTIME_DIR": str(place)}
    # The runtime prints as well.
    return json.loads(_output(words, found | {"LD_LIBRARY_PATH": str(folder)}).stdout.splitlines()[-1])


def partitions(model, libraries):
    """For each program of a model: operations that OpenVINO's compiler for NPUs selects, all, partitions."""
    words = ("-m", "tests.export.compiled", "--npu", str(model))
    log = _output(words, {"LD_LIBRARY_PATH": str(libraries)}).stderr
    pattern = r"selected (\d+) ops, from a total of (\d+) ops. resulted in (\d+) partitions"
    return [tuple(map(int, each)) for each in re.findall(pattern, log)]


def _output(words, env):
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def _opened(model, accelerator):
    from ai_edge_litert.compiled_model import CompiledModel
    from ai_edge_litert.hardware_accelerator import HardwareAccelerator
    from ai_edge_litert.options import GpuOptions, IntelOpenVinoOptions, Options

    kind = getattr(HardwareAccelerator, accelerator)
    more = {}
    if accelerator == "GPU":
        more["gpu_options"] = GpuOptions(enforce_f32=True)
    if accelerator == "NPU":
        kind |= HardwareAccelerator.CPU
        more["intel_openvino_options"] = IntelOpenVinoOptions()
    return CompiledModel.from_file(model, options=Options(hardware_accelerators=kind, **more))


def _answer(model, prompt, count):
    """Greedy tokens after a prompt, which is read in chunks whose last is padded."""
    signatures = model.get_signature_list()
    (prefill,) = (each for each in signatures if each.startswith("prefill"))
    details = {name: model.get_input_tensor_details(name) for name in (prefill, "decode")}
    caches = {
        name: np.zeros(tuple(each["shape"]), DTYPES[np.dtype(each["dtype"]).name])
        for name, each in details["decode"].items()
        if name.startswith("kv_cache")
    }

    def fed(name, part, at):
        size, room = (int(each) for each in details[name]["mask"]["shape"][-2:])
        tokens, positions = np.zeros((1, size), np.int32), np.zeros(size, np.int32)
        tokens[0, : len(part)], positions[: len(part)] = part, at + np.arange(len(part))
        mask = np.arange(room)[None] <= positions[:, None]
        given = {"tokens": tokens, "input_pos": positions, "mask": mask[None, None], **caches}
        out = ran({name: model}, name, given)
        logits = out.pop("logits", None)
        caches.update(out)
        return logits

    size = int(details[prefill]["mask"]["shape"][-2])
    for at in range(0, len(prompt) - 1, size):
        fed(prefill, prompt[at : min(at + size, len(prompt) - 1)], at)
    said = [prompt[-1]]
    for index in range(count):
        said.append(int(fed("decode", said[-1:], len(prompt) - 1 + index)[0, -1].argmax()))
    return said[1:]


if __name__ == "__main__":
    if sys.argv[1] == "--npu":
        _opened(sys.argv[2], "NPU")
    else:
        model, count, prompt = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
        gpu = _opened(model, "GPU")
        answers = [_answer(each, prompt, count) for each in (gpu, _opened(model, "CPU"))]
        print(json.dumps({"whole": gpu.is_fully_accelerated(), "gpu": answers[0], "cpu": answers[1]}))
