"""Lists the operators that a `.tflite` model runs."""

import dataclasses
from collections import Counter

_CUSTOM = 32


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator by name and by the types of its first two inputs and of its output."""

    name: str
    inputs: tuple[str, ...]
    output: str


def operators(data: bytes) -> dict[str, Counter[Operator]]:
    """The operators of each signature."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(data, 0))
    names = {value: name for name, value in vars(schema.BuiltinOperator).items() if not name.startswith("_")}
    types = {value: name for name, value in vars(schema.TensorType).items() if not name.startswith("_")}
    found = {}
    for signature in model.signatureDefs:
        graph, count = model.subgraphs[signature.subgraphIndex], Counter()
        for each in graph.operators:
            code = model.operatorCodes[each.opcodeIndex]
            number = max(code.builtinCode, code.deprecatedBuiltinCode)
            name = code.customCode.decode() if number == _CUSTOM else names[number]
            inputs = [types[graph.tensors[index].type] for index in list(each.inputs)[:2] if index >= 0]
            count[Operator(name, tuple(inputs), types[graph.tensors[each.outputs[0]].type])] += 1
        found[signature.signatureKey.decode()] = count
    return found
